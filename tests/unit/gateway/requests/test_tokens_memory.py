"""What the gateway takes to tokenize a text, measured in a process of its own, as tokenizers allocate beside Python."""

from pathlib import Path

import pytest

from engines.models.tiny import write_tokenizer
from tests.support.own_process import ran

TIMES, MORE_BYTES = 48, 64 << 20
"""The bound of ``docs/security.md``."""

_WORK = """
import ctypes
import gc
import json
import random
from pathlib import Path
from time import monotonic

from gateway.admission.fair_threads import FairThreads
from gateway.errors import InvalidRequestError
from gateway.fingerprint import Fingerprinter, load_tokenizer
from gateway.http.body_memory import BodyMemory
from gateway.registry import Registry
from gateway.registry.checks import CheckRules
from gateway.requests.call import parse_call
from gateway.requests.tokens import TokenApi
from gateway.types import Operation

CHARS = 3_000_000
KINDS = ("words", "letters", "lines of emoji", "one run", "words beside an emoji")
choose = random.Random(1)
words = ["".join(choose.choices("abcdefghijklmnopqrstuvwxyz", k=choose.randrange(1, 9))) for _ in range(2000)]


def text_of(kind):
    match kind:
        case "words":
            return " ".join(choose.choices(words, k=CHARS // 5))
        case "letters":
            return "a " * (CHARS // 2)
        case "lines of emoji":
            each = lambda at: chr(choose.randrange(0x1F300, 0x1F600)) if at % 60 else "\\nx"
            return "".join(map(each, range(CHARS // 4)))
        case "one run":
            return "".join(choose.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=CHARS))
        case "words beside an emoji":
            return chr(0x1F600) + " ".join(choose.choices(words, k=CHARS // 5))


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


tokenizer = load_tokenizer(Path({folder!r}))
with FairThreads(1, memory=BodyMemory(1 << 30, shed=print), bound=1, ageing_s=1.0, clock=monotonic) as threads:
    tokens = TokenApi(tokenizer=tokenizer, threads=threads, registry=Registry([], rules=CheckRules(unhealthy_after=1)))
    fingerprinter = Fingerprinter(tokenizer, threads)

    def tokenize(text):
        body = json.dumps({"prompt": text, "return_token_strs": True}, ensure_ascii=False).encode()
        return body, lambda: tokens._tokenize(body, salt="s")

    def detokenize(text):
        body = json.dumps({"tokens": [7] * (len(text) // 4)}).encode()
        return body, lambda: tokens._detokenize(body)

    def chat(text):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
        return body, lambda: fingerprinter._encode(parse_call(Operation.CHAT, body).prompt, "s")

    def complete(text):
        body = json.dumps({"model": "m", "prompt": text}, ensure_ascii=False).encode()
        return body, lambda: fingerprinter._encode(parse_call(Operation.COMPLETIONS, body).prompt, "s")

    for each in (tokenize, detokenize, chat, complete):
        each("two words")[1]()
    for kind in KINDS:
        body, work = {operation}(text_of(kind))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free of earlier ones is no room for this one
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        try:
            found = work()
        except InvalidRequestError as error:
            assert kind == "one run", error
        print("took", kind.replace(" ", "_"), status("VmHWM") - before, len(body))
        found = None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("operation", ["tokenize", "detokenize", "chat", "complete"])
def test_a_text_takes_a_bounded_multiple_of_its_body_to_be_tokenized(folder: Path, operation: str) -> None:
    said = ran(_WORK.replace("{folder!r}", repr(str(folder))).replace("{operation}", operation))
    measured = [line.split()[1:] for line in said.splitlines() if line.startswith("took ")]
    assert len(measured) == 5
    for kind, took, body in measured:
        assert int(took) <= TIMES * int(body) + MORE_BYTES, (kind, int(took) / int(body))
