"""The longest context of a model folder, by which ``kvgate replay --tokenizer`` leaves long requests out."""

from pathlib import Path

import pytest

from engines.models.tiny import build_tiny
from lab.driver.run import _context_of, _local_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"max_position_embeddings": 4096}', 4096),
        ('{"max_position_embeddings": 0}', None),
        ('{"max_position_embeddings": "4096"}', None),
        ("{}", None),
        ("[]", None),
        ("{", None),
    ],
)
def test_the_context_is_what_the_configuration_names(tmp_path: Path, text: str, expected: int | None) -> None:
    (tmp_path / "config.json").write_text(text)
    assert _context_of(tmp_path) == expected


def test_a_folder_without_configuration_names_none(tmp_path: Path) -> None:
    assert _context_of(tmp_path) is None


def test_words_learnt_from_a_model_folder_know_its_context(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")
    assert _local_words(folder).context_tokens == _context_of(folder) is not None
