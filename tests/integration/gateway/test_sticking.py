"""Chats that can't be named as engines name them stay where they began, as others do."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.models.tiny import write_tokenizer
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, running_fleet
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.tokenized_fleet import tokenized_fleet

CHATS, TURNS = 6, 6
Content = Callable[[int], Any]


def image(number: int) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{number:0>4000}"
    return [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]


def their_image(number: int) -> list[dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": f"{number:0>4000}"}
    return [{"type": "image", "source": source}, {"type": "text", "text": "look"}]


def document(number: int) -> list[dict[str, Any]]:
    return [{"type": "document", "source": {"type": "text", "data": f"{number} " * 200}}]


async def homes(fleet: Fleet, path: str, content: Content, *inline: dict[str, str]) -> list[set[str]]:
    """Hold several chats at once, turn by turn; return which instances each was at."""
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": content(number)}, *inline] for number in range(CHATS)
    ]
    at: list[set[str]] = [set() for _ in chats]
    for turn in range(TURNS):
        for number, messages in enumerate(chats):
            body = {"model": MODEL, "max_tokens": 4, "messages": messages}
            async with fleet.gateway.post(path, body) as answer:
                assert answer.status == 200, await answer.text()
                at[number].add(answer.headers["x-kvgate-instance"])
            messages += [
                {"role": "assistant", "content": f"answer {turn} " * 20},
                {"role": "user", "content": f"turn {turn} " * 20},
            ]
    return at


def stay(at: list[set[str]]) -> None:
    assert [len(each) for each in at] == [1] * CHATS
    assert min(Counter(name for each in at for name in each).values()) >= CHATS // 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("path", "content"),
    [(CHAT, image), ("/v1/messages", their_image), ("/v1/messages", document)],
    ids=["image", "their image", "document"],
)
async def test_a_chat_with_an_opaque_first_message_stays_where_it_began(
    tmp_path: Path, model: Path, path: str, content: Content
) -> None:
    async with tokenized_fleet(tmp_path, model) as fleet:
        stay(await homes(fleet, path, content))


async def test_a_chat_with_a_system_message_among_the_others_is_matched_by_its_blocks(
    tmp_path: Path, model: Path
) -> None:
    async with tokenized_fleet(tmp_path, model) as fleet:
        said = {"role": "system", "content": "be brief"}
        stay(await homes(fleet, "/v1/messages", lambda number: f"chat {number} " * 30, said))
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "chat 1 " * 30}, said]}
        async with fleet.gateway.post("/v1/messages", body) as answer:
            assert "reason=longest_match" in answer.headers["x-kvgate-route"]


@pytest.mark.parametrize("publishes", [True, False])
async def test_without_a_tokenizer_chats_with_images_stay_too(tmp_path: Path, *, publishes: bool) -> None:
    engines = {name: ScriptedEngine(kv=publishes) for name in ("a", "b")}
    async with running_fleet(tmp_path, engines) as fleet:
        stay(await homes(fleet, CHAT, image))


async def test_without_a_tokenizer_chats_stay_by_their_text_with_engines_that_announce_blocks(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        stay(await homes(fleet, CHAT, lambda number: f"chat {number} " * 60))


@pytest.mark.parametrize("publishes", [True, False])
async def test_what_has_no_fingerprint_stays_by_its_session(tmp_path: Path, *, publishes: bool) -> None:
    engines = {name: ScriptedEngine(kv=publishes) for name in ("a", "b")}
    async with running_fleet(tmp_path, engines) as fleet:
        at: dict[str, set[str]] = {f"s{number}": set() for number in range(CHATS)}
        for turn in range(TURNS):
            for session, names in at.items():
                body = {"model": MODEL, "prompt": [f"{turn} " * 500, f"{session} " * 500]}
                async with fleet.gateway.post(COMPLETIONS, body, x_session_id=session) as answer:
                    assert answer.status == 200
                    names.add(answer.headers["x-kvgate-instance"])
        stay(list(at.values()))
