"""The tenant's salt on its way from the request header into LMDeploy's prefix cache.

    header -> middleware -> ContextVar -> GenerationConfig -> (pickled to the engine process) -> SamplingParam
           -> the extra identity of every block of the sequence

LMDeploy's trie matches a block only where tokens *and* extra identity are equal, so two salts never share KV, nor does
a salted request with an unsalted one. The salt rides as a ``MultimodalSpan`` of length 0: code that reads the identity
finds the type that it expects. ``kvcontrol.core.hashing`` takes the same salt as the key of the root.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from kvcontrol.core.control import CACHE_SALT_HEADER
from kvcontrol.core.hashing import MAX_SALT_BYTES

_HEADER = CACHE_SALT_HEADER.encode()
_ATTRIBUTE = "kvgate_cache_salt"
_SPANS = "kvgate_salt_spans"
_MODALITY = "kvgate.cache_salt"

_current_salt: ContextVar[str] = ContextVar("kvgate_cache_salt", default="")

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class CacheSaltError(ValueError):
    """The salt header of a request is not what is allowed; the message never repeats its value."""


class CacheSaltMiddleware:
    """Pure ASGI: makes the request's salt the context's salt, or answers 400 in OpenAI's error envelope."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            salt = salt_of_headers(scope["headers"])
        except CacheSaltError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
            else:
                await _send_400(send, str(error))
            return
        token = _current_salt.set(salt)
        try:
            await self._app(scope, receive, send)
        finally:
            _current_salt.reset(token)


def salt_of_headers(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the salt of a request, "" where the header is absent; raises ``CacheSaltError``."""
    values = [value for name, value in headers if name.lower() == _HEADER]
    if not values:
        return ""
    if len(values) > 1:
        raise CacheSaltError(f"{CACHE_SALT_HEADER} is given {len(values)} times; give it once or not at all")
    [value] = values
    if not 1 <= len(value) <= MAX_SALT_BYTES:
        raise CacheSaltError(
            f"{CACHE_SALT_HEADER} is {len(value)} bytes long; 1 to {MAX_SALT_BYTES} are allowed"
            " (leave the header out for unsalted requests)"
        )
    if any(not 0x21 <= byte <= 0x7E for byte in value):  # noqa: PLR2004  # "!" to "~"
        raise CacheSaltError(f"{CACHE_SALT_HEADER} holds a byte that is not a printable ASCII character without space")
    return value.decode("ascii")


def salt_of_identity(extra_identity: tuple[Any, ...]) -> str:
    """Return the salt inside a trie node's extra identity, "" where there is none."""
    if extra_identity and extra_identity[0].modality == _MODALITY:
        return str(extra_identity[0].content_hash)
    return ""


def salt_of_sequence(seq: Any) -> str:
    """Return the salt that LMDeploy's sequence was sent with, "" where there is none."""
    return str(getattr(seq.sampling_param, _ATTRIBUTE, ""))


def without_salt(extra_identity: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what else than the salt a block depends on."""
    return extra_identity[1:] if salt_of_identity(extra_identity) else extra_identity


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def generation_config_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``GenerationConfig.__post_init__``, in the api_server: note the salt of the request that is being handled."""

    def __post_init__(self: Any) -> None:  # noqa: N807  # it is called by this name
        original(self)
        if salt := _current_salt.get():
            setattr(self, _ATTRIBUTE, salt)

    return __post_init__


def sampling_param_from_gen_config(original: Any) -> Any:
    """``SamplingParam.from_gen_config``, in the engine process: carry the salt on."""
    function = original.__func__

    def from_gen_config(cls: Any, gen_config: Any) -> Any:
        param = function(cls, gen_config)
        if salt := getattr(gen_config, _ATTRIBUTE, ""):
            setattr(param, _ATTRIBUTE, salt)
        return param

    return classmethod(from_gen_config)


def block_extra_identity(original: Callable[[Any, int, int], tuple[Any, ...]]) -> Any:
    """``SchedulerSequence.get_prefix_cache_extra_identity``: the salt comes first."""

    def get_prefix_cache_extra_identity(self: Any, start: int, end: int) -> tuple[Any, ...]:
        others = original(self, start, end)
        return _salt_spans(self) + others if others else _salt_spans(self)

    return get_prefix_cache_extra_identity


def request_extra_identity(original: Callable[[Any, int], tuple[Any, ...]]) -> Any:
    """``make_request_multimodal_identity``: what a state checkpoint is verified against, salted likewise."""

    def make_request_multimodal_identity(seq: Any, step: int) -> tuple[Any, ...]:
        return _salt_spans(seq) + original(seq, step)

    return make_request_multimodal_identity


def _salt_spans(seq: Any) -> tuple[Any, ...]:
    """The salt as a span, made once a request: it is asked for with every block, on the engine's thread."""
    salt = salt_of_sequence(seq)
    if not salt:
        return ()
    param = seq.sampling_param
    spans: tuple[Any, ...] = getattr(param, _SPANS, ())
    if not spans or spans[0].content_hash != salt:
        spans = _spans_of(salt)
        setattr(param, _SPANS, spans)
    return spans


def _spans_of(salt: str) -> tuple[Any, ...]:
    from lmdeploy.pytorch.prefix_cache_state import MultimodalSpan

    return (MultimodalSpan(0, 0, _MODALITY, salt),)


async def _send_400(send: _Send, message: str) -> None:
    body = json.dumps(
        {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": CACHE_SALT_HEADER,
                "code": "invalid_cache_salt",
            }
        }
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


__all__ = [
    "CacheSaltError",
    "CacheSaltMiddleware",
    "block_extra_identity",
    "generation_config_post_init",
    "request_extra_identity",
    "salt_of_headers",
    "salt_of_identity",
    "salt_of_sequence",
    "sampling_param_from_gen_config",
    "without_salt",
]
