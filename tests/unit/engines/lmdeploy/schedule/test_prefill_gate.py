"""A long prompt that waits beside a chunk is matched once, and again as soon as a match could find more."""

from collections.abc import Iterator
from typing import Any

import pytest

from engines.lmdeploy.schedule import prefill_gate
from tests.support.block_trie import BLOCK_TOKENS, Paging, prompt

CHUNK_TOKENS = 32
MODULE = "lmdeploy.pytorch.paging.prefill_scheduler"


class Line(Paging):
    """A scheduler whose chunks are short, and which counts the matches that were tried."""

    def __init__(self) -> None:
        super().__init__(400)
        self.scheduler._prefill_scheduler.cache_config.max_prefill_token_num = CHUNK_TOKENS
        self.matches = 0
        match = self.trie.match

        def counted(seq: Any) -> None:
            self.matches += 1
            match(seq)

        self.trie.match = counted

    def compute(self, tokens: list[int]) -> None:
        """Another request brings these tokens into the trie, and is over."""
        sequence = self.begin(tokens)
        assert sequence is not None
        self.scheduler.end_session(sequence.session_id)

    def wait(self, tokens: list[int]) -> Any:
        import torch
        from lmdeploy.pytorch.messages import SamplingParam

        session = self.scheduler.add_session(next(self._sessions))
        return session.add_sequence(torch.tensor(tokens), sampling_param=SamplingParam())

    def beside_a_chunk(self) -> list[Any]:
        """Return what LMDeploy admits while a long prompt is computed: short ones alone."""
        return list(self.scheduler.schedule(is_prefill=True, allow_long_prefill=False).running)


@pytest.fixture
def line() -> Iterator[Line]:
    from engines.lmdeploy.patching import Hook, install

    undo = install(
        [
            Hook(
                target=f"{MODULE}:_PrefillAdmissionAttempt._try_match_prefix_for_prefill_gate",
                signature="(self) -> bool",
                replace=prefill_gate.try_match_prefix_for_prefill_gate,
                why="what is tested",
            )
        ]
    )
    yield Line()
    undo()


def test_a_prompt_that_stays_long_is_matched_once(line: Line) -> None:
    waiting = line.wait(prompt(1, 40))
    free = line.free
    for _ in range(5):
        assert line.beside_a_chunk() == []
    assert line.matches == 1
    assert (line.free, int(waiting.num_history_ids), waiting.num_blocks) == (free, 0, 0)


def test_a_prompt_whose_next_block_came_into_the_trie_is_matched_again_and_admitted_once_it_is_short(
    line: Line,
) -> None:
    tokens = prompt(1, 40)
    waiting = line.wait(tokens)
    assert line.beside_a_chunk() == []
    line.compute(tokens[: 10 * BLOCK_TOKENS + 1])  # still 30 blocks left
    tried = line.matches
    assert line.beside_a_chunk() == []
    assert line.matches == tried + 1
    line.compute(tokens[: 36 * BLOCK_TOKENS + 1])
    assert line.beside_a_chunk() == [waiting]
    assert int(waiting.num_history_ids) == 36 * BLOCK_TOKENS


def test_a_prompt_is_matched_again_when_the_end_of_its_match_was_evicted_and_came_back(line: Line) -> None:
    tokens = prompt(1, 40)
    line.compute(tokens[: 10 * BLOCK_TOKENS + 1])
    waiting = line.wait(tokens)
    assert line.beside_a_chunk() == []
    line.trie.evict(10)
    line.compute(tokens[: 36 * BLOCK_TOKENS + 1])
    assert line.beside_a_chunk() == [waiting]


def test_a_prompt_that_a_longer_chunk_has_room_for_is_admitted(line: Line) -> None:
    tokens = prompt(1, 40)
    line.compute(tokens[: 10 * BLOCK_TOKENS + 1])
    waiting = line.wait(tokens)
    assert line.beside_a_chunk() == []
    line.scheduler._prefill_scheduler.cache_config.max_prefill_token_num = 30 * BLOCK_TOKENS + 1
    assert line.beside_a_chunk() == [waiting]


def test_the_turn_of_long_prompts_is_as_it_was(line: Line) -> None:
    waiting = line.wait(prompt(1, 40))
    assert line.beside_a_chunk() == []
    assert list(line.scheduler.schedule(is_prefill=True).running) == [waiting]
