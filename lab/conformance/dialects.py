"""Streams of Responses and Messages as engines send them, and whether one is in order to its end."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Event = tuple[str, Mapping[str, Any]]
_LAST = frozenset({"error", "response.completed", "response.incomplete", "response.failed", "message_stop"})


def responses_events(model: str, text: str, chunks: int, usage: Mapping[str, int]) -> list[bytes]:
    """Return a whole stream of one message of so many text events, numbered from 0."""
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    response = {"id": "resp_1", "object": "response", "created_at": 1, "model": model, "status": "in_progress"}
    place = {"output_index": 0, "item_id": "msg_1", "content_index": 0}
    whole = "".join(f"{text}{number}" for number in range(chunks))
    part = {"type": "output_text", "text": whole, "annotations": []}
    done = item | {"status": "completed", "content": [part]}
    told: list[Event] = [
        ("response.created", {"response": response | {"output": []}}),
        ("response.in_progress", {"response": response | {"output": []}}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        ("response.content_part.added", place | {"part": part | {"text": ""}}),
        *(("response.output_text.delta", place | {"delta": f"{text}{number}"}) for number in range(chunks)),
        ("response.output_text.done", place | {"text": whole}),
        ("response.content_part.done", place | {"part": part}),
        ("response.output_item.done", {"output_index": 0, "item": done}),
    ]
    counted = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    told.append(("response.completed", {"response": response | {"status": "completed", "output": [done]} | counted}))
    return [_event(kind, {"sequence_number": number, **said}) for number, (kind, said) in enumerate(told)]


def messages_events(model: str, text: str, chunks: int, usage: Mapping[str, int]) -> list[bytes]:
    """Return a whole stream of a thought, and a text of so many text events."""
    message: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
    }
    counted = {"input_tokens": usage["prompt_tokens"], "output_tokens": 1}
    thought, words = {"type": "thinking", "thinking": ""}, {"type": "text", "text": ""}
    told: list[Event] = [
        ("message_start", {"message": message | {"usage": counted}}),
        ("content_block_start", {"index": 0, "content_block": thought}),
        ("content_block_delta", {"index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        ("content_block_stop", {"index": 0}),
        ("content_block_start", {"index": 1, "content_block": words}),
        *(
            ("content_block_delta", {"index": 1, "delta": {"type": "text_delta", "text": f"{text}{number}"}})
            for number in range(chunks)
        ),
        ("content_block_stop", {"index": 1}),
        (
            "message_delta",
            {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": usage["completion_tokens"]}},
        ),
        ("message_stop", {}),
    ]
    return [_event(kind, said) for kind, said in told]


def _event(kind: str, said: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **said}, ensure_ascii=False)}\n\n".encode()


def disorder(stream: str) -> str | None:
    """Return what is wrong with a stream of typed events that has ended, None where all is in order: each event whole
    and named after its type, numbers without a gap, each item and block opened and closed once, the end said last.
    """
    events = list(_read(stream))
    numbers = [said["sequence_number"] for _, said in events if "sequence_number" in said]
    ids = {response["id"] for _, said in events if isinstance(response := said.get("response"), dict)}
    found = [
        "it has no event" if not events else "",
        f"its sequence numbers are {numbers}" if numbers and numbers != list(range(len(events))) else "",
        f"its response has the ids {sorted(ids)}" if len(ids) > 1 else "",
        "an event is not named after its type" if any(kind != said.get("type") for kind, said in events) else "",
        f"it ends with {events[-1][0]}" if events and events[-1][0] not in _LAST else "",
        _left_open(events),
    ]
    return next((each for each in found if each), None)


def _left_open(events: Sequence[Event]) -> str:
    for opening, closing, index in (
        ("content_block_start", "content_block_stop", "index"),
        ("response.output_item.added", "response.output_item.done", "output_index"),
    ):
        opened = [said[index] for kind, said in events if kind == opening]
        closed = [said[index] for kind, said in events if kind == closing]
        if sorted(opened) != sorted(closed):
            return f"{opening} for {opened}, {closing} for {closed}"
    return ""


def _read(stream: str) -> Iterator[Event]:
    for each in stream.replace("\r\n", "\n").split("\n\n"):
        lines = each.split("\n")
        data = "\n".join(line[5:].strip() for line in lines if line.startswith("data:"))
        if data and data != "[DONE]":
            said = json.loads(data)
            kind = next((line[6:].strip() for line in lines if line.startswith("event:")), said.get("type", ""))
            if kind != "ping":
                yield kind, said
