"""No request of a client ends an instance, and one whose engine process is killed answers 503 until it is gone."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.instance import Instance

pytestmark = pytest.mark.engine

HUGE = 2**70
_HELLO = [{"role": "user", "content": "Hello"}]


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "m", "messages": _HELLO, "max_tokens": 3, **fields}


def _completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "m", "prompt": "Hello", "max_tokens": 3, **fields}


def _generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": [5, 6, 7], "max_tokens": 3, **fields}


def _messages(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "m", "messages": _HELLO, "max_tokens": 3, **fields}


REFUSED = {
    "empty prompt": (_completion(prompt=""), "the prompt has no tokens"),
    "one empty prompt of two": (_completion(prompt=["a", ""]), "the prompt has no tokens"),
    "no prompt at all": (_completion(prompt=[]), "prompt is an empty list"),
    "no messages": (_chat(messages=[]), "messages must not be empty"),
    "token beyond the vocabulary": (_chat(messages=[], input_ids=[1_000_000_000]), "input_ids holds 1000000000"),
    "huge token": (_chat(messages=[], input_ids=[HUGE]), "input_ids holds"),
    "negative token": (_chat(messages=[], input_ids=[-7]), "input_ids holds -7"),
    "negative token to generate": (_generate(input_ids=[-7]), "input_ids holds -7"),
    "token just beyond": (_generate(input_ids=[1024 * 1024]), "token ids of 0 to"),
    "stop token beyond": (_generate(stop_token_ids=[1_000_000_000]), "stop_token_ids holds"),
    "negative stop token": (_generate(stop_token_ids=[-7]), "stop_token_ids holds -7"),
    "huge stop token": (_generate(stop_token_ids=[HUGE]), "stop_token_ids holds"),
    "negative top_k": (_completion(top_k=-1), "top_k"),
    "temperature NaN": (_completion(temperature=float("nan")), "temperature"),
    "temperature Infinity": (_chat(temperature=float("inf")), "temperature"),
    "top_p NaN": (_completion(top_p=float("nan")), "top_p"),
    "min_p NaN": (_completion(min_p=float("nan")), "min_p"),
    "min_p 5": (_completion(min_p=5), "min_p"),
    "repetition_penalty NaN": (
        _completion(repetition_penalty=float("nan"), temperature=1),
        "repetition_penalty is nan",
    ),
    "repetition_penalty Infinity": (_chat(repetition_penalty=float("inf")), "repetition_penalty is inf"),
    "repetition_penalty -1": (_chat(repetition_penalty=-1), "repetition_penalty is -1"),
    "repetition_penalty 1e-300": (_chat(repetition_penalty=1e-300), "repetition_penalty is 1e-300"),
    "ngram of 2**70": (_chat(repetition_ngram_size=HUGE, repetition_ngram_threshold=1), "repetition_ngram_size"),
    "threshold of 2**70": (_chat(repetition_ngram_size=2, repetition_ngram_threshold=HUGE), "repetition_ngram_thr"),
    "min_new_tokens over max": (_chat(min_new_tokens=4), "min_new_tokens is 4"),
    "min_new_tokens of 2**69": (_chat(min_new_tokens=2**69, max_tokens=HUGE), "min_new_tokens is"),
    "n of 0": (_completion(n=0), "n 0 must be"),
    "n of null": (_completion(n=None), "n is null"),
    "n of 2**70": (_chat(n=HUGE), "exceeds the maximum"),
    "max_tokens -1": (_completion(max_tokens=-1), "max_new_tokens"),
    "logprobs beyond the vocabulary": (_completion(logprobs=10**9), "logprobs is 1000000000"),
    "negative logprobs": (_completion(logprobs=-5), "logprobs must be non-negative"),
    "logprobs of the prompt": (
        _generate(return_logprob=True, logprob_start_len=0, max_tokens=0),
        "logprob_start_len is not served",
    ),
    "prompt too long": (_completion(prompt="word " * 6000), "nput length"),
    "prompt longer than the pool": (_generate(input_ids=[5] * 1020), "maximum context length is"),
    "bias beyond": (_chat(logit_bias={"1000000000": 1}), "logit_bias"),
    "bias negative": (_chat(logit_bias={"-1": 1}), "logit_bias"),
    "bias of no token": (_chat(logit_bias={"a": 1}), "logit_bias"),
    "with_cache": (_completion(with_cache=True), "with_cache is not allowed"),
    "preserve_cache": (_chat(preserve_cache=True), "preserve_cache is not allowed"),
    "migration_request": (_chat(migration_request={"protocol": 1}), "migration_request is not allowed"),
    "migration_request of nonsense": (_completion(migration_request="x"), "migration_request is not allowed"),
    "negative token as a message": (_messages(messages=[], input_ids=[-7]), "input_ids holds -7"),
}

SERVED = {
    "top_k of 10**9": _completion(top_k=1_000_000_000, temperature=1),
    "top_k of 2**70": _completion(top_k=HUGE, temperature=1),
    "top_k of 2**70 in a chat": _chat(top_k=HUGE, temperature=1),
    "top_k of 0": _generate(top_k=0, temperature=1.0),
    "top_k as a message": _messages(top_k=HUGE, temperature=1.0),
    "temperature of 1e-300": _completion(temperature=1e-300),
    "temperature of 0": _completion(temperature=0),
    "top_p of 1e-300": _completion(top_p=1e-300, temperature=1),
    "min_p of 1": _completion(min_p=1, temperature=1),
    "seed of 2**70": _completion(seed=HUGE, temperature=1),
    "seed of -2**70": _chat(seed=-HUGE, temperature=1),
    "max_tokens of 2**70": _chat(max_tokens=HUGE, stop=["e", "a", "o", "t"]),
    "session of 2**70": _completion(session_id=HUGE),
    "negative session": _completion(session_id=-5),
    "penalised": _chat(repetition_penalty=1.3, temperature=0.7, repetition_ngram_size=2, repetition_ngram_threshold=2),
    "stop on nothing": _completion(stop=[""], ignore_eos=True),
    "no migration": _chat(with_cache=False, preserve_cache=False, migration_request=None),
}


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    log = tmp_path_factory.mktemp("poison") / "log"
    with Instance.start(tiny_llama, log, "--logprobs-mode", "raw_logprobs") as running:
        yield running


def _post(instance: Instance, path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(  # noqa: S310 - our own
        f"{instance.url}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "anthropic-version": "2023-06-01"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _epoch(instance: Instance) -> str:
    with urllib.request.urlopen(f"{instance.url}/kv/v1/stats", timeout=60) as answer:  # noqa: S310
        return str(json.load(answer)["epoch"])


@pytest.fixture
def unharmed(instance: Instance) -> Iterator[None]:
    """The engine that served before serves after."""
    before = _epoch(instance)
    yield
    status, text = _post(instance, *_completion(ignore_eos=True))
    assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 3), instance.output()
    assert _epoch(instance) == before


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("unharmed")
def test_what_the_engine_cannot_run_is_a_400_that_names_it(instance: Instance, name: str) -> None:
    (path, body), named = REFUSED[name]
    status, text = _post(instance, path, body)
    assert status == 400, text
    assert named in text


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.usefixtures("unharmed")
def test_what_only_looks_odd_is_served(instance: Instance, name: str) -> None:
    status, text = _post(instance, *SERVED[name])
    assert status == 200, text


@pytest.mark.usefixtures("unharmed")
def test_all_of_it_at_once_harms_nobody(instance: Instance) -> None:
    refused = [request for request, _ in REFUSED.values()]
    served = [request for name, request in SERVED.items() if "session" not in name]  # of which there is one at a time
    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(lambda request: _post(instance, *request)[0], [*refused, *served] * 2))
    assert statuses == [*[400] * len(refused), *[200] * len(served)] * 2


@pytest.mark.usefixtures("unharmed")
def test_a_biased_token_is_the_one_that_is_drawn(instance: Instance) -> None:
    status, text = _post(
        instance, *_chat(logit_bias={"300": 100}, temperature=0, return_token_ids=True, ignore_eos=True)
    )
    assert status == 200, text
    assert json.loads(text)["choices"][0]["output_ids"] == [300, 300, 300]


def test_requests_on_an_engine_that_was_killed_are_503s(tiny_llama: Path, tmp_path: Path) -> None:
    statuses: list[int] = []

    def ask(*, stream: bool) -> None:
        try:
            while not statuses or statuses[-1] < 500:
                statuses.append(_post(instance, *_completion(max_tokens=300, ignore_eos=True, stream=stream))[0])
        except (OSError, EOFError):
            return  # the instance has exited

    with Instance.start(tiny_llama, tmp_path / "log") as instance:
        assert _post(instance, *_completion())[0] == 200
        threads = [threading.Thread(target=ask, kwargs={"stream": False}) for _ in range(4)]
        for thread in threads:
            thread.start()
        threads[0].join(3)  # well into their decoding
        instance.engine_process().kill()
        for _ in range(3):
            try:
                statuses.append(_post(instance, *_completion())[0])
            except OSError:
                break  # the instance has exited
        for thread in threads:
            thread.join(120)
        assert 503 in statuses
        assert set(statuses) <= {200, 503}
