"""What a client sends must arrive: fields, bytes, headers; and what is wrong must be refused clearly."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator

from lab.conformance.case import case, need
from lab.conformance.mock import MODEL
from lab.conformance.rig import CHAT, COMPLETIONS, Answer, Rig, body_of

_CALLERS = {
    "x-request-id": "conformance-1",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "x-session-id": "session-1",
    "x-custom-header": "kept",
}
_HOP_BY_HOP = {"connection": "keep-alive, x-named", "x-named": "no", "keep-alive": "timeout=5", "te": "trailers"}
_DEEP = 10_000
_MANY_FIELDS = 40_000
_MANY_THINGS = 20_000
_UNDER_WAY_S = 0.2
_DELAY_S = 10.0


def is_envelope(answer: Answer) -> bool:
    """Whether an answer is OpenAI's error envelope, as its SDK reads it."""
    error = answer.error()
    fields = [error.get(name) for name in ("type", "param", "code")]
    return bool(
        answer.kind == "application/json"
        and isinstance(error.get("message"), str)
        and error["message"]
        and all(isinstance(each, str | None) for each in fields)
    )


@case("unknown-fields-kept", seen="sglang-router, vllm-router, smg")
async def unknown_fields(rig: Rig) -> None:
    """Body fields that the gateway doesn't know reach the backend, and none is added or renamed."""
    script = rig.script()
    extra = {"my_field": {"a": [1, 2]}, "user": "u-1", "max_tokens": 5, "logit_bias": {"7": 1.5}, "top_k": 3}
    answer = await rig.ask(script, extra=extra)
    need(answer.status == 200, f"a request with unknown fields got {answer.shown()}")
    got = json.loads(rig.seen(script)[-1].body)
    sent = body_of(script, CHAT, extra)
    lost = [name for name in sent if name not in got or got[name] != sent[name]]
    added = [name for name in got if name not in sent]
    need(not lost and not added, f"lost or changed: {lost}; added: {added}")


@case("body-bytes-unchanged", seen="sglang-router, vllm-router, smg")
async def body_bytes(rig: Rig) -> None:
    """A body that needs no change arrives byte for byte: spacing, order of keys, spelling of numbers and escapes."""
    script = rig.script()
    message = json.dumps([{"content": script.prompt() + " é 中", "role": "user"}])
    body = f'{{ "top_p" : 1.0,\n"messages":{message} ,"x":1e2,"model":"{MODEL}"}}'.encode()
    answer = await rig.post(CHAT, body)
    need(answer.status == 200, f"got {answer.shown()}")
    need(rig.seen(script)[-1].body == body, "the backend got other bytes than the client sent")


@case("caller-headers-kept", seen="vllm-router #155, sglang-router, smg, litellm")
async def caller_headers(rig: Rig) -> None:
    """Tracing, session and unknown headers of the caller reach the backend."""
    for path in (CHAT, COMPLETIONS):
        script = rig.script()
        body = json.dumps(body_of(script, path)).encode()
        answer = await rig.post(path, body, rig.headers() | _CALLERS)
        need(answer.status == 200, f"got {answer.shown()}")
        seen = rig.seen(script)[-1]
        lost = [name for name, value in _CALLERS.items() if seen.header(name) != value]
        need(not lost, f"{path}: the backend did not get {', '.join(lost)}")


@case("hop-by-hop-headers-dropped", seen="RFC 9110 section 7.6.1")
async def hop_by_hop(rig: Rig) -> None:
    """Hop-by-hop headers, and those that Connection names, stay on their hop."""
    script = rig.script()
    answer = await rig.post(CHAT, json.dumps(body_of(script, CHAT)).encode(), rig.headers() | _HOP_BY_HOP)
    need(answer.status == 200, f"got {answer.shown()}")
    seen = rig.seen(script)[-1]
    crossed = [name for name in ("x-named", "keep-alive", "te") if seen.header(name) is not None]
    need(not crossed, f"the backend got {', '.join(crossed)}")


@case("malformed-body-400", seen="production-stack #1017, aibrix #1111, lmdeploy proxy")
async def malformed(rig: Rig) -> None:
    """Seven malformed bodies are each a 400 with an error object, and reach no backend."""
    before = sum(len(backend.seen) for backend in rig.backends)
    start = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"x"}}]'
    bodies = {
        "empty": b"",
        "cut": start.encode(),
        "a list": b"[]",
        "deep nesting": (start + ',"x":' + "[" * _DEEP + "]" * _DEEP + "}").encode(),
        "bad UTF-8": start.replace('"x"', '"\xff"').encode("latin-1") + b"}",
        "messages no list": f'{{"model":"{MODEL}","messages":7}}'.encode(),
        "trailing text": (start + "} {}").encode(),
    }
    wrong = []
    for name, body in bodies.items():
        answer = await rig.post(CHAT, body)
        if answer.status != 400 or not is_envelope(answer):
            wrong.append(f"{name}: {answer.shown()}")
    need(not wrong, "; ".join(wrong))
    need(sum(len(backend.seen) for backend in rig.backends) == before, "a malformed body reached a backend")


@case("duplicate-keys-refused", seen="production-stack #1017")
async def duplicate_keys(rig: Rig) -> None:
    """A body that names two models is refused: gateway and backend might read different ones."""
    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"x"}}],"model":"other"}}'.encode()
    answer = await rig.post(CHAT, body)
    need(answer.status in {400, 404} and is_envelope(answer), f"got {answer.shown()}")


@case("many-fields-delay-nobody", seen="kvgate: 40,000 escaped names took 37 s")
async def many_fields(rig: Rig) -> None:
    """While a body with 40,000 fields is read, others are answered; it is answered or refused itself, too."""
    script = rig.script()
    start = json.dumps(body_of(script, CHAT)).encode()[:-1]
    fields = ",".join(f'"\\u0061{number:x}":1' for number in range(_MANY_FIELDS))
    await _beside(rig, start + b"," + fields.encode() + b"}")


@case("many-things-delay-nobody", seen="-")
async def many_things(rig: Rig) -> None:
    """So it is with 20,000 messages, parts, tools or items of a prompt, and with 20,000 special tokens in a text."""
    said, text = {"role": "user", "content": "x"}, {"type": "text", "text": "x"}
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(_MANY_THINGS)]
    for fields in (
        {"messages": [said] * _MANY_THINGS},
        {"messages": [{"role": "user", "content": [text] * _MANY_THINGS}]},
        {"tools": tools},
        {"metadata": [[7]] * _MANY_THINGS},
        {"messages": [{"role": "user", "content": "<|im_end|>x" * _MANY_THINGS}]},
    ):
        await _beside(rig, json.dumps(body_of(rig.script(), CHAT, fields)).encode())


async def _beside(rig: Rig, body: bytes) -> None:
    """Ask for something else while a body is read."""
    heavy = asyncio.create_task(rig.post(CHAT, body))
    try:
        await asyncio.sleep(_UNDER_WAY_S)
        answer = await rig.ask(rig.script())
        need(answer.status == 200, f"a request beside it got {answer.shown()}")
        need(answer.seconds < _DELAY_S, f"a request beside it took {answer.seconds:.1f} s")
        heavy_answer = await heavy
        need(heavy_answer.status in {200, 400, 413}, f"it got {heavy_answer.shown()}")
    finally:
        heavy.cancel()


@case("unknown-model-404", seen="sglang-router, vllm-router")
async def unknown_model(rig: Rig) -> None:
    """A model that nobody serves is a 404 with code model_not_found; no model at all is a 400."""
    script = rig.script()
    answer = await rig.ask(script, extra={"model": "nobody-serves-this"})
    code = answer.error().get("code")
    need(answer.status == 404 and is_envelope(answer), f"an unknown model got {answer.shown()}")
    need(code == "model_not_found", f"its code is {code!r}")
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    answer = await rig.post(CHAT, body)
    need(answer.status == 400 and is_envelope(answer), f"a missing model got {answer.shown()}")


@case("models-listed-once", seen="production-stack #892, vllm-router, lmdeploy proxy")
async def models(rig: Rig) -> None:
    """/v1/models lists each id once, with the fields that the backends give."""
    answer = await rig.get("/v1/models")
    said = answer.json()
    need(answer.status == 200 and isinstance(said, dict), f"got {answer.shown()}")
    cards = [card for card in said.get("data", []) if isinstance(card, dict) and card.get("id") == MODEL]
    need(len(cards) == 1, f"{MODEL} is listed {len(cards)} times")
    need(cards[0].get("max_model_len") == 8192, f"max_model_len is {cards[0].get('max_model_len')!r}")


@case("embeddings", seen="lmdeploy proxy")
async def embeddings(rig: Rig) -> None:
    """/v1/embeddings is passed on."""
    answer = await rig.ask(rig.script(), "/v1/embeddings")
    said = answer.json()
    need(answer.status == 200 and isinstance(said, dict) and said.get("data"), f"got {answer.shown()}")


@case("text-completions", seen="-")
async def completions(rig: Rig) -> None:
    """/v1/completions is passed on, a batch of prompts too."""
    answer = await rig.ask(rig.script(), COMPLETIONS)
    need(answer.status == 200 and answer.json()["choices"][0]["text"] == "tok0tok1tok2", f"got {answer.shown()}")
    script = rig.script()
    answer = await rig.ask(script, COMPLETIONS, extra={"prompt": [script.prompt(), "second"]})
    need(answer.status == 200, f"a batch got {answer.shown()}")
    need(json.loads(rig.seen(script)[-1].body)["prompt"] == [script.prompt(), "second"], "the batch was changed")


@case("large-bodies", seen="GIE #854 #2056, envoy ai-gateway #805")
async def large(rig: Rig) -> None:
    """Bodies of 32 kB, 1 MB and 20 MB pass."""
    for size in (32 << 10, 1 << 20, 20 << 20):
        script = rig.script()
        answer = await rig.ask(script, extra={"messages": [{"role": "user", "content": script.prompt() + "x" * size}]})
        need(answer.status == 200, f"{size} bytes got {answer.shown()}")
        need(len(rig.seen(script)[-1].body) > size, f"{size} bytes: the backend got fewer")


@case("chunked-request", seen="-")
async def chunked(rig: Rig) -> None:
    """A body of unknown length (Transfer-Encoding: chunked) is taken."""
    script = rig.script()
    body = json.dumps(body_of(script, CHAT)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 40):
            yield body[start : start + 40]
            await asyncio.sleep(0)

    async with rig.session.post(rig.target + CHAT, data=pieces(), headers=rig.headers()) as answer:
        status = answer.status
        await answer.read()
    need(status == 200, f"got {status}")
    need(zlib.crc32(rig.seen(script)[-1].body) == zlib.crc32(body), "the backend got another body")


@case("decision-visible", seen="production-stack #683, aibrix, smg")
async def decision(rig: Rig) -> None:
    """An answer's headers tell which backend gave it."""
    names: dict[str, dict[str, set[str]]] = {}
    scripts = [rig.script(ttft_s=0.3) for _ in range(12)]
    answers = await asyncio.gather(*(rig.ask(each) for each in scripts))
    for script, answer in zip(scripts, answers, strict=True):
        for name, value in answer.headers.items():
            names.setdefault(name, {}).setdefault(value, set()).add(rig.served_by(script))
    used = {rig.served_by(each) for each in scripts}
    need(len(used) > 1, f"all of 12 requests at once went to {used}")
    telling = [
        name
        for name, values in names.items()
        if len(values) == len(used) and all(len(backends) == 1 for backends in values.values())
    ]
    need(telling, "no header of 12 answers tells the backend")


CASES = (
    unknown_fields,
    body_bytes,
    caller_headers,
    hop_by_hop,
    malformed,
    duplicate_keys,
    many_fields,
    many_things,
    unknown_model,
    models,
    embeddings,
    completions,
    large,
    chunked,
    decision,
)
