"""Routes that count, encode or score a text answer as LMDeploy's own do, and tokenize beside the event loop."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from engines.lmdeploy.hooks import prompt_hooks
from engines.lmdeploy.patching import install
from engines.requests.limits import EngineLimits
from tests.support.tokenizer_kinds import byte_level

TEXT = "the quick brown fox 😀 jumps over the lazy dog\n" * 20
MESSAGES = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "?"},
]
CONTEXT = 2000
FAR = "word " * (CONTEXT * 32 // 5 + 20)
"""A text that has more tokens than the context whatever it says."""
LONG = "a b c d " * CONTEXT
"""One whose length alone does not tell."""
ANTHROPIC = {"anthropic-version": "2023-06-01"}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/encode", {"input": TEXT}),
    ("/v1/encode", {"input": [TEXT, "a", ""], "add_bos": False}),
    ("/v1/encode", {"input": TEXT, "do_preprocess": True}),
    ("/v1/encode", {"input": 5}),
    ("/pooling", {"model": "m", "input": TEXT}),
    ("/pooling", {"model": "m", "input": [TEXT, "a"]}),
    ("/pooling", {"model": "m", "input": [[1, 2], [3]]}),
    ("/pooling", {"model": "m", "input": []}),
    ("/get_ppl", {"input": TEXT}),
    ("/get_ppl", {"input": [1, 2, 3]}),
    ("/get_ppl", {"input": ""}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES, "system": "Be brief."}),
    ("/v1/messages/count_tokens", {"model": "other", "messages": MESSAGES}),
]


class Engine:
    """What the routes use of LMDeploy's ``AsyncEngine``; its answers tell the tokens that it got."""

    model_name = "m"
    is_sleeping = False

    def __init__(self, folder: Path) -> None:
        from lmdeploy.model import get_chat_template
        from lmdeploy.serve.processors.multimodal import MultimodalProcessor
        from lmdeploy.tokenizer import Tokenizer

        self.chat_template = get_chat_template(str(folder), None)
        self.tokenizer = Tokenizer(str(folder))
        self.prompt_processor = MultimodalProcessor(self.tokenizer, self.chat_template)
        self.backend_config = SimpleNamespace(
            kvgate_limits=EngineLimits(vocab_tokens=100_000, context_tokens=CONTEXT, repetition_window_tokens=1)
        )
        self.encoded_on: set[str] = set()
        self.asked = 0
        encode = self.tokenizer.encode

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.encoded_on.add(threading.current_thread().name)
            return encode(*args, **kwargs)

        self.tokenizer.encode = watched

    async def async_get_reward_score(self, input_ids: list[list[int]]) -> list[list[float]]:
        self.asked += 1
        return [[float(token) for token in tokens] for tokens in input_ids]

    async def async_get_ppl(self, input_ids: list[int]) -> float:
        self.asked += 1
        return float(sum(input_ids))


def client(engine: Engine) -> TestClient:
    from lmdeploy.serve.anthropic.endpoints import messages_count_tokens
    from lmdeploy.serve.openai.endpoints import auxiliary

    router, context = APIRouter(), SimpleNamespace(async_engine=engine, engine_config=SimpleNamespace())
    auxiliary.register(router, context)
    messages_count_tokens.register(router, context, merge_inline_system=True)
    app = FastAPI()
    app.include_router(router)
    return TestClient(app)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tokenizers") / "byte-level")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Iterator[tuple[TestClient, Engine]]:
    engine = Engine(folder)
    with client(engine) as asked:
        yield asked, engine


@pytest.fixture(scope="module")
def hooked(folder: Path) -> Iterator[tuple[TestClient, Engine]]:
    undo = install(prompt_hooks())
    engine = Engine(folder)
    made = client(engine)
    undo()
    with made as asked:
        yield asked, engine
    engine.prompt_processor.kvgate_prompts.close()


def path_alone(value: object) -> str:
    return value if isinstance(value, str) and value.startswith("/") else ""


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=path_alone)
def test_every_answer_is_lmdeploys_and_no_text_is_tokenized_on_the_loop(
    stock: tuple[TestClient, Engine], hooked: tuple[TestClient, Engine], path: str, body: dict[str, Any]
) -> None:
    def without_id(answer: Any) -> Any:
        found = answer.json()
        return {key: value for key, value in found.items() if key not in {"id", "created"}}

    theirs, ours = (asked.post(path, json=body, headers=ANTHROPIC) for asked, _ in (stock, hooked))
    assert ours.status_code == theirs.status_code
    assert without_id(ours) == without_id(theirs)
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    assert all(name.startswith("kvgate-texts") for name in hooked[1].encoded_on)
    assert not any(name.startswith("kvgate-texts") for name in stock[1].encoded_on)


BLOCK = {"type": "text", "text": FAR}
TOO_LONG: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/encode", {"input": FAR}, False),
    ("/v1/encode", {"input": ["a", FAR[: len(FAR) // 2], FAR[: len(FAR) // 2 + 40]]}, False),
    ("/v1/encode", {"input": FAR, "do_preprocess": True}, False),
    ("/pooling", {"input": FAR}, False),
    ("/pooling", {"input": ["a", FAR]}, False),
    ("/pooling", {"input": LONG}, True),
    ("/pooling", {"input": ["a", LONG]}, True),
    ("/pooling", {"input": [1] * (CONTEXT + 1)}, False),
    ("/pooling", {"input": [[1], [1] * (CONTEXT + 1)]}, False),
    ("/get_ppl", {"input": FAR}, False),
    ("/get_ppl", {"input": LONG}, True),
    ("/get_ppl", {"input": [1] * (CONTEXT + 1)}, False),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": FAR}]}, False),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": [BLOCK]}]}, False),
    ("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES, "system": [BLOCK]}, False),
]
MANY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/encode", {"input": ["a"] * 2049}, "2049 entries; at most 2048"),
    ("/pooling", {"input": ["a"] * 129}, "129 entries; at most 128"),
    ("/pooling", {"input": [[1]] * 129}, "129 entries; at most 128"),
    ("/pooling", {"input": [[1], [100_000]]}, "token ids of 0 to 99999"),
    ("/pooling", {"input": [[1], []]}, "at least 1"),
    ("/get_ppl", {"input": [1, -1]}, "token ids of 0 to 99999"),
]


@pytest.mark.parametrize(
    ("path", "body", "tokenized"), TOO_LONG, ids=lambda each: each if isinstance(each, str) else ""
)
def test_a_text_beyond_the_context_is_refused_with_the_code_of_its_api_before_the_engine_gets_it(
    hooked: tuple[TestClient, Engine], path: str, body: dict[str, Any], *, tokenized: bool
) -> None:
    asked, engine = hooked
    engine.encoded_on.clear()
    before = engine.asked
    answer = asked.post(path, json=body, headers=ANTHROPIC)
    assert (answer.status_code, engine.asked, bool(engine.encoded_on)) == (400, before, tokenized)
    said = answer.json()
    if path.startswith("/v1/messages"):
        assert said["type"] == "error"
        assert said["error"]["type"] == "invalid_request_error"
        assert said["error"]["message"].startswith("prompt is too long: ")
        assert said["error"]["message"].endswith(f" tokens > {CONTEXT} maximum")
    else:
        assert said["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in said["message"]


@pytest.mark.parametrize(("path", "body", "why"), MANY, ids=path_alone)
def test_inputs_that_are_too_many_or_no_tokens_are_refused_before_the_engine_gets_them(
    hooked: tuple[TestClient, Engine], path: str, body: dict[str, Any], why: str
) -> None:
    asked, engine = hooked
    engine.encoded_on.clear()
    before = engine.asked
    answer = asked.post(path, json=body)
    assert (answer.status_code, engine.asked, engine.encoded_on) == (400, before, set())
    assert why in answer.json()["message"]


def test_what_a_model_does_not_serve_is_a_400(
    hooked: tuple[TestClient, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, engine = hooked

    async def not_served(_: object) -> None:
        raise ValueError("LlamaForCausalLM is not in reward model list")

    monkeypatch.setattr(engine, "async_get_reward_score", not_served)
    answer = asked.post("/pooling", json={"input": TEXT})
    assert answer.status_code == 400
    assert "not in reward model list" in answer.json()["message"]


@pytest.mark.parametrize("path", ["/pooling", "/get_ppl"])
def test_a_sleeping_engine_is_not_asked(
    hooked: tuple[TestClient, Engine], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    from lmdeploy.serve.core.exceptions import RequestError

    asked, engine = hooked
    monkeypatch.setattr(engine, "is_sleeping", True)
    before = engine.asked
    with pytest.raises(RequestError, match="is sleeping") as refused:  # the server answers it
        asked.post(path, json={"input": TEXT})
    assert refused.value.status_code == 503
    assert engine.asked == before


def test_images_of_messages_to_count_are_no_text(hooked: tuple[TestClient, Engine]) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * len(FAR)}}
    body = {"model": "m", "messages": [{"role": "user", "content": [image, {"type": "text", "text": "a"}]}]}
    answer = hooked[0].post("/v1/messages/count_tokens", json=body, headers=ANTHROPIC)
    assert "too long" not in answer.text


async def test_a_prompt_with_pictures_is_tokenized_in_a_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from lmdeploy.vl.engine import ImageEncoder

    seen: list[str] = []

    class Model:
        def has_input_ids(self, _messages: object) -> bool:
            return False

        def to_pytorch(self, messages: list[dict[str, Any]], *_: object, **__: object) -> list[dict[str, Any]]:
            seen.append(threading.current_thread().name)
            return [{"prompt": messages[0]["content"]}]

    encoder = object.__new__(ImageEncoder)
    encoder.model = Model()
    undo = install([hook for hook in prompt_hooks() if "ImageEncoder" in hook.target])
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="pictures") as encoder.executor:
            found = await encoder.wrap_for_pytorch([{"content": "a picture"}], None, None)
    finally:
        undo()
    assert found == [{"prompt": "a picture"}]
    assert seen == ["pictures_0"]
