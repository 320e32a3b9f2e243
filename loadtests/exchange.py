"""One streamed chat, timed, over ``http.client``: with the standard library alone, which gevent makes cooperative."""

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvcontrol.traces.synthesis import Ask, SynthesisError, TokenCount, Words, learn_words
from kvcontrol.traces.usage import UsageError, used

Message = dict[str, str]

_LOOK_UP_S = 30.0
_OK = 200
_SHED = (429, 503)
_SHOWN_BYTES = 300


class TargetError(RuntimeError):
    """A target can't be tested; the message says why."""


@dataclass(slots=True, kw_only=True)
class Reply:
    """What one request came to. ``error`` is "" for a whole answer; ``shed`` is a refusal with 429 or 503.

    ``ttft_ms`` runs to the first event with a choice, with text or without; ``gaps_ms`` are the pauses between such
    events, but for one that only ends the answer.
    """

    total_ms: float = 0.0
    ttft_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    text: str = ""
    size_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    shed: bool = False
    error: str = ""


class Client:
    """One kept connection to a target, and what goes over it. Not for two requests at a time."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise TargetError(f"--host {url!r}: an address like http://127.0.0.1:8000 is allowed")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self.url = url
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def close(self) -> None:
        self._connection.close()

    def look_up(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Return the object that is answered; raises ``TargetError`` for anything else."""
        try:
            data = None if body is None else json.dumps(body).encode()
            self._connection.request(method, self._path + path, data, self._headers)
            response = self._connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise TargetError(
                f"{self.url}{path}: {error or type(error).__name__}: is the gateway running there?"
            ) from error
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        if response.status != _OK or not isinstance(said, dict):
            shown = text[:_SHOWN_BYTES].decode(errors="replace")
            raise TargetError(f"{self.url}{path} answers {response.status}: {shown}")
        return said

    def chat(self, model: str, messages: Sequence[Message], answer_tokens: int) -> Reply:
        """Ask and read the whole answer; whatever comes of it stands in the reply. Raises nothing of the network's."""
        reply = Reply()
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        began_s = time.perf_counter()
        try:
            self._connection.request("POST", f"{self._path}/v1/chat/completions", data, self._headers)
            response = self._connection.getresponse()
            if response.status == _OK:
                reading = _Reading(reply, began_s, began_s + self._timeout_s)
                while line := response.readline():
                    reading.take(line, time.perf_counter())
                reading.settle()
            else:
                reply.shed = response.status in _SHED
                reply.error = str(response.status)  # stays where the body breaks off
                reply.error = f"{response.status} {_code(response.read())}".rstrip()
        except TimeoutError:
            reply.error = reply.error or "timeout"
        except (OSError, http.client.HTTPException) as error:
            reply.error = reply.error or f"connection lost: {type(error).__name__}"
        except ValueError:
            reply.error = reply.error or "unreadable answer"
        if reply.error:
            self.close()  # something of the answer may still be under way
        reply.total_ms = 1000 * (time.perf_counter() - began_s)
        return reply


class _Reading:
    """The stream of one answer, line by line as it comes."""

    def __init__(self, reply: Reply, began_s: float, until_s: float) -> None:
        self._reply = reply
        self._began_s = began_s
        self._until_s = until_s
        self._pieces: list[str] = []
        self._usage: Any = None
        self._done = False
        self._events = 0
        self._last_s = began_s

    def take(self, line: bytes, now_s: float) -> None:
        if now_s > self._until_s:
            raise TimeoutError
        self._reply.size_bytes += len(line)
        data = line[5:].strip()
        if not line.startswith(b"data:"):
            return
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event is an object")  # noqa: TRY004 - one kind of error for one kind of answer
        if event.get("error"):
            self._reply.error = self._reply.error or f"error in the stream {_code(data)}".rstrip()
        self._usage = event.get("usage") or self._usage
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._choice(choice, now_s)

    def _choice(self, choice: Any, now_s: float) -> None:
        text = ""
        match choice:
            case {"delta": {"content": str(said)}} if said:
                text = said
            case {"delta": {"reasoning_content": str(said)}} if said:
                text = said
        if self._events and not text and isinstance(choice, dict) and choice.get("finish_reason") is not None:
            return  # it only ends the answer
        if self._events:
            self._reply.gaps_ms.append(1000 * (now_s - self._last_s))
        else:
            self._reply.ttft_ms = 1000 * (now_s - self._began_s)
        self._events += 1
        self._pieces.append(text)
        self._last_s = now_s

    def settle(self) -> None:
        reply = self._reply
        reply.text = "".join(self._pieces)
        if not reply.error and not self._done:
            reply.error = "stream cut off"
        elif not reply.error and not self._usage:
            reply.error = "no usage told"
        if self._usage:
            try:
                reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens = used(self._usage)
            except UsageError as error:
                reply.error = reply.error or f"unreadable answer: {error}"


def _code(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def only_model(client: Client) -> str:
    """Return the only model that is served; raises ``TargetError`` where there is none, or a choice."""
    served = [str(each.get("id")) for each in client.look_up("GET", "/v1/models").get("data", ())]
    if len(served) == 1:
        return served[0]
    raise TargetError(f"{client.url} serves {', '.join(served) or 'no model'}: say which with --model NAME")


def words_of(url: str, model: str, *, api_key: str | None) -> Words:
    """Learn from ``/tokenize`` what is one token; raises ``TargetError``."""
    client = Client(url, api_key=api_key, timeout_s=_LOOK_UP_S)

    def told(ask: Ask) -> TokenCount:
        asked: dict[str, object] = {"model": model}
        if ask.as_message:
            asked["messages"] = [{"role": "user", "content": ask.text}]
        else:
            asked |= {"prompt": ask.text, "add_special_tokens": False, "return_token_strs": True}
        said = client.look_up("POST", "/tokenize", asked)
        return TokenCount(
            count=said["count"], spelled=said.get("token_strs") or (), context_tokens=said.get("max_model_len")
        )

    learning = learn_words()
    try:
        ask = next(learning)
        while True:
            ask = learning.send(told(ask))
    except StopIteration as done:
        words: Words = done.value
        return words
    except (SynthesisError, KeyError) as error:
        raise TargetError(f"{url}/tokenize: {error}") from error
    finally:
        client.close()
