"""What a backend answers must come out: status, type, length of wait; and never multiplied by retries."""

import asyncio
import gzip
from http import HTTPStatus

from lab.conformance.bodies import is_envelope
from lab.conformance.case import case, need
from lab.conformance.mock import openai_error
from lab.conformance.rig import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Rig

_KEPT = (400, 422, 429, 500)
_OK = HTTPStatus.OK


@case("status-kept", seen="litellm #32221, lmdeploy proxy")
async def statuses(rig: Rig) -> None:
    """400, 422, 429 and 500 of a backend keep their status, whole and streamed."""
    wrong = []
    for status in _KEPT:
        for stream in (False, True):
            answer = await rig.ask(rig.script(status=status), extra={"stream": stream})
            if answer.status != status:
                wrong.append(f"{status}{' streamed' if stream else ''} became {answer.status}")
    need(not wrong, "; ".join(wrong))


@case("foreign-error-wrapped", seen="litellm #4970 #39536, lmdeploy")
async def foreign_errors(rig: Rig) -> None:
    """LMDeploy's errors (fields on top level, a number as code) and plain HTML become OpenAI's envelope."""
    for shape in ("lmdeploy", "html"):
        answer = await rig.ask(rig.script(status=400, shape=shape))
        need(answer.status == 400 and is_envelope(answer), f"an error of shape {shape} got {answer.shown()}")
        if shape == "lmdeploy":
            need("scripted 400" in str(answer.error().get("message")), f"its message is lost: {answer.shown()}")


@case("right-error-unchanged", seen="aibrix #2594 #2585")
async def right_error(rig: Rig) -> None:
    """An error that is OpenAI's envelope already comes out as it is, wrapped no second time."""
    answer = await rig.ask(rig.script(status=400, shape="openai"))
    need(answer.body == openai_error(400), f"got {answer.shown()}")


@case("retry-after-kept", seen="litellm #21553, vllm-router, smg")
async def retry_after(rig: Rig) -> None:
    """Retry-After of a backend's 429 reaches the client."""
    answer = await rig.ask(rig.script(status=429, retry_after="7"))
    got = answer.headers.get("retry-after")
    need(answer.status == 429 and got == "7", f"status {answer.status}, Retry-After {got!r}")


@case("no-retry-of-429-and-500", seen="vllm-router, smg")
async def no_retry(rig: Rig) -> None:
    """A backend's 429 or 500 is not tried again: that would multiply the load."""
    for status in (429, 500):
        script = rig.script(status=status)
        await rig.ask(script)
        tries = len(rig.seen(script))
        need(tries == 1, f"a {status} was tried {tries} times")


@case("retry-503-elsewhere", seen="production-stack #839")
async def retry_503(rig: Rig) -> None:
    """A 503 before the first byte is tried on the other backend, and not there again and again."""
    script = rig.script(status=503)
    answer = await rig.ask(script)
    served = [backend.name for backend in rig.backends for _ in backend.of(script.id)]
    need(len(set(served)) > 1, f"only {served} was tried")
    need(len(served) <= 3, f"it was tried {len(served)} times")
    need(answer.status in {502, 503}, f"got {answer.shown()}")


@case("stale-connection-replaced", seen="RFC 9110 section 15.5.9")
async def stale(rig: Rig) -> None:
    """A kept connection that its backend ends with a 408 is replaced: the client sees nothing of it."""
    for _ in range(4):
        await asyncio.gather(*(rig.ask(rig.script()) for _ in range(4)))
    answers = await asyncio.gather(*(rig.ask(rig.script(stale=True)) for _ in range(8)))
    bad = [each for each in answers if each.status != _OK]
    need(not bad, f"{len(bad)} of {len(answers)} got {bad[0].shown() if bad else ''}")


@case("media-type-kept", seen="production-stack #880, lmdeploy #4130, smg #1857, vllm-router")
async def media_types(rig: Rig) -> None:
    """The content type is the backend's: JSON stays JSON, a stream a stream, a JSON error to stream=true JSON."""
    wanted = (
        ({"stream": False}, 200, "application/json"),
        ({"stream": True}, 200, "text/event-stream"),
        ({"stream": True}, 500, "application/json"),
        ({"stream": False}, 400, "application/json"),
    )
    wrong = []
    for extra, status, kind in wanted:
        answer = await rig.ask(rig.script(status=status), extra=extra)
        if answer.kind != kind:
            wrong.append(f"{status} with {extra} is {answer.kind}")
    need(not wrong, "; ".join(wrong))


@case("gzip-consistent", seen="production-stack #836 #827")
async def gzipped(rig: Rig) -> None:
    """A compressed answer can be read: its bytes are what its content-encoding says."""
    answer = await rig.ask(rig.script(gzip=True))
    need(answer.status == 200, f"got {answer.status}")
    need(answer.json() is not None, "the body is not JSON after decoding")
    headers = rig.headers() | {"accept-encoding": "identity"}
    script = rig.script(gzip=True)
    body = f'{{"model":"mock-model","messages":[{{"role":"user","content":{_quoted(script.prompt())}}}]}}'
    plain = await rig.post(CHAT, body.encode(), headers)
    raw = plain.body if plain.headers.get("content-encoding") != "gzip" or plain.json() else gzip.decompress(plain.body)
    need(raw.startswith(b"{"), "the body is neither plain nor gzip")


@case("context-length-code", seen="-")
async def context(rig: Rig) -> None:
    """A prompt beyond the context has the code or the phrase on which clients of its API compact, streamed too."""
    words = "Input length (9000) must be smaller than the model context length (8192)."
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        for stream in (False, True):
            answer = await rig.ask(rig.script(status=400, message=words), path, extra={"stream": stream})
            need(answer.status == 400, f"{path} got {answer.shown()}")
            error = answer.error()
            if path == MESSAGES:
                said = str(error.get("message"))
                need("prompt is too long: 9000 tokens > 8192 maximum" in said, f"{path} got {answer.shown()}")
            else:
                need(error.get("code") == "context_length_exceeded", f"{path} got {answer.shown()}")


@case("messages-error-types", seen="-")
async def messages_errors(rig: Rig) -> None:
    """A backend's error on Messages is in Anthropic's envelope, with the type of its status."""
    for status, kind in (
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ):
        for shape in ("lmdeploy", "openai"):
            answer = await rig.ask(rig.script(status=status, shape=shape), MESSAGES)
            said = answer.error().get("type")
            need((answer.status, said) == (status, kind), f"{status} in the shape of {shape} got {answer.shown()}")


@case("mistakes-harm-nobody", seen="smg, vllm-router")
async def mistakes(rig: Rig) -> None:
    """After 40 requests that the backends refuse as wrong, also with a 500 about the context, both serve everybody."""
    words = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
    for status in (400, 422, 500):
        await asyncio.gather(*(rig.ask(rig.script(status=status, message=words)) for _ in range(40)))
        answers = [await rig.ask(rig.script()) for _ in range(8)]
        bad = [each for each in answers if each.status != 200]
        need(not bad, f"after 40 answers {status}: {bad[0].shown() if bad else ''}")
        need(await rig.both_used(3.0) is not None, f"after 40 answers {status} one backend is not used for 3 s")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


CASES = (
    statuses,
    foreign_errors,
    right_error,
    retry_after,
    no_retry,
    retry_503,
    stale,
    media_types,
    gzipped,
    context,
    messages_errors,
    mistakes,
)
