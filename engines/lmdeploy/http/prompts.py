"""Prompts are rendered and tokenized beside the api_server's event loop, and what a tenant sent before isn't tokenized
again.

LMDeploy does both on the loop of all streams: 0.3 s for 60,000 tokens, while every stream of the instance stands still.
Here a thread does it. A fast tokenizer lets the interpreter lock go while it encodes, and a prompt's segments between
special tokens are remembered for its tenant (``kvcontrol.tokenization.pieces``): of a new turn only the new messages
are encoded. Whether that gives what LMDeploy's own ``encode`` gives is tried out for each tokenizer at start, on texts
that are hard to get right; where it doesn't, LMDeploy's own runs, in the thread.

``fastokens``, which the gateway uses to route, isn't used: its tokens would be those that are computed, and a text that
it gets wrong would change an answer.
"""

import asyncio
import copy
import logging
import os
import threading
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from engines.lmdeploy.settings import EngineSettings
from engines.requests.salt import SALT
from kvcontrol.core.hashing import token_bytes
from kvcontrol.tokenization import HuggingFaceEncoder, Memoryless, PieceMemory, disagreement, remembering

_MOST_THREADS: Final = 4
_PROMPTS: Final = "kvgate_prompts"
_log = logging.getLogger("lmdeploy.kvgate")

Encode = Callable[[str, str], list[int]]
"""From a text and its tenant's salt to token ids."""


class Prompts:
    """Threads that render and tokenize prompts, and what they remember. ``tokenizer`` is LMDeploy's."""

    def __init__(self, tokenizer: Any, *, memory_bytes: int) -> None:
        """Return at once: how prompts are encoded is found out in a thread, and the first prompt waits for it."""
        self.memory = PieceMemory(memory_bytes)
        self._tokenizer = tokenizer
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvgate-prompts")
        self._alone = ThreadPoolExecutor(1, thread_name_prefix="kvgate-texts")
        self._encode: Future[Encode] = self._threads.submit(encode_of, tokenizer, self.memory)

    async def make(self, processor: Any, make: Callable[[Any], Coroutine[Any, Any, Any]], *, salt: str) -> Any:
        """Return what ``make`` returns for a ``MultimodalProcessor`` like ``processor``, whose tokenizer remembers."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._made, processor, make, salt)

    def _made(self, processor: Any, make: Callable[[Any], Coroutine[Any, Any, Any]], salt: str) -> Any:
        tokenizer = copy.copy(self._tokenizer)
        tokenizer.model = _Remembering(self._tokenizer.model, partial(self._encode.result(), salt))
        like = copy.copy(processor)
        like.tokenizer = tokenizer
        return run_to_its_end(make(like))

    async def alone(self, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns, which uses LMDeploy's own tokenizer: one at a time, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._alone, work)

    def close(self) -> None:
        """End the threads once they have no more to do."""
        self._threads.shutdown()
        self._alone.shutdown()


class _Remembering:
    """LMDeploy's ``HuggingFaceTokenizer`` as far as encoding a prompt needs it."""

    def __init__(self, model: Any, encode: Callable[[str], list[int]]) -> None:
        self._model = model
        self._encode = encode

    @property
    def bos_token_id(self) -> Any:
        return self._model.bos_token_id

    def encode(self, s: str, add_bos: bool = True, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002
        if add_bos and add_special_tokens:
            return self._encode(s)
        ids: list[int] = self._model.encode(s, add_bos, add_special_tokens)
        return ids


class _Stock:
    """LMDeploy's own ``encode``, one thread at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock = threading.Lock()

    def ids(self, salt: str, text: str) -> list[int]:
        del salt
        with self._lock:
            ids: list[int] = self._model.encode(text)
            return ids

    def encode(self, text: str) -> bytes:
        return token_bytes(self.ids("", text))


def encode_of(tokenizer: Any, memory: PieceMemory) -> Encode:
    """Find out how texts are encoded fastest with the tokens of LMDeploy's ``tokenizer``. Seconds for a large one."""
    stock = _Stock(tokenizer.model)
    backend = getattr(tokenizer.model.model, "backend_tokenizer", None)
    if backend is None:
        _log.warning("prompts are tokenized by a slow tokenizer, one at a time and each as a whole")
        return stock.ids
    try:
        own = type(backend).from_str(backend.to_str())  # encoding mustn't meet another thread's change of settings
    except Exception as error:  # noqa: BLE001 - the library raises it as it is, for a part that is written in Python
        _log.warning("prompts are tokenized by LMDeploy, each as a whole: the tokenizer can't be copied: %s", error)
        return stock.ids
    encoder = HuggingFaceEncoder(own)
    wrong = disagreement(encoder, stock)
    if wrong is not None:
        _log.warning("prompts are tokenized by LMDeploy, each as a whole: it encodes %r in its own way", wrong[:40])
        return stock.ids
    remembered = remembering(encoder, own, memory)
    if isinstance(remembered, Memoryless):
        _log.warning("each prompt is tokenized as a whole: %s", remembered.reason)
        return lambda _salt, text: _unpacked(encoder.encode(text))
    return lambda salt, text: _unpacked(remembered.encode(text, salt=salt))


def _unpacked(packed: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(packed)
    return ids.tolist()


def run_to_its_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing to its end, without a loop."""
    try:
        waiting_for = coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError(f"rendering a prompt waits for {waiting_for!r}, which a thread without a loop can't")


def prompts_of(processor: Any) -> Prompts:
    """Return what tokenizes for LMDeploy's ``MultimodalProcessor``."""
    prompts: Prompts = getattr(processor, _PROMPTS)
    return prompts


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def processor_init(original: Callable[..., None]) -> Callable[..., None]:
    """``MultimodalProcessor.__init__``, in the api_server: a processor gets its threads."""

    def __init__(self: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # called by this name
        original(self, tokenizer, *args, **kwargs)
        setattr(self, _PROMPTS, Prompts(tokenizer, memory_bytes=EngineSettings.load().prompt_memory_bytes))

    return __init__


def get_text_prompt_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """``MultimodalProcessor._get_text_prompt_input``, in the api_server: not on its loop."""

    async def _get_text_prompt_input(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await prompts_of(self).make(self, lambda like: original(like, *args, **kwargs), salt=SALT.current)

    return _get_text_prompt_input


def wrap_for_pytorch(original: Callable[..., Any]) -> Callable[..., Any]:
    """``ImageEncoder.wrap_for_pytorch``, in the api_server: prompts with pictures, too, are tokenized in a thread."""

    async def wrap_for_pytorch(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, lambda: run_to_its_end(original(self, *args, **kwargs)))

    return wrap_for_pytorch
