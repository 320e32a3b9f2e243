"""KV events, ``/kv/v1``, salts and answers of an instance: of LMDeploy (api_server, spawned engine process), and of the
simulated engine, which passes for one.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines.sim.text import SimTokenizer
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import CACHE_SALT_HEADER
from kvcontrol.core.events import BlockStored
from tests.support import kv_events
from tests.support.instance import Instance, free_port
from tests.support.kv_events import block_names, chat_tokens, hbm, held_after, replay, snapshot, stats
from tests.support.simulated_instance import SimulatedInstance
from tests.support.told import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    asked_about,
    choices,
    shape,
    stop_in,
    tell,
)

pytestmark = pytest.mark.engine

BLOCK = 16


@pytest.fixture(scope="module")
def lmdeploy(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance.start(
        tiny_llama, tmp_path_factory.mktemp("instance") / "log", "--num-gpu-blocks", "1024"
    ) as instance:
        yield instance


@pytest.fixture(scope="module")
def simulated(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with SimulatedInstance.serve(tiny_llama, tmp_path_factory.mktemp("simulated") / "log") as instance:
        yield instance


@pytest.fixture(params=["lmdeploy", "simulated"])
def instance(request: pytest.FixtureRequest) -> Instance:
    found: Instance = request.getfixturevalue(request.param)
    return found


def chat(instance: Instance, text: str, *, salt: str | None = None, new_tokens: int = 4) -> int:
    """Send one user message and return how many of its tokens were cached."""
    answer = kv_events.post(
        f"{instance.url}/v1/chat/completions",
        {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
        {} if salt is None else {CACHE_SALT_HEADER: salt},
    )
    assert answer.status == 200, answer
    return int(answer.body["usage"]["prompt_tokens_details"]["cached_tokens"])


def text_about(subject: str) -> str:
    return f"Tell me about {subject}. " + "Say it again, slowly and in other words, so that all may follow. " * 6


def test_stored_blocks_have_the_names_that_tokenizer_template_and_hashing_give(
    instance: Instance, tiny_llama: Path
) -> None:
    text = text_about("lighthouses")
    tokens = chat_tokens(tiny_llama, text)
    full = len(tokens) // BLOCK
    before = stats(instance.url)
    names = block_names(before.identity, tokens)
    assert len(names) == full > 4
    assert chat(instance, text) == 0
    batches = replay(before.events.replay_endpoint, before.events.seq + 1)
    told: list[BlockStored] = [event for _, events in batches for event in events if isinstance(event, BlockStored)]
    assert told[0].parent is None
    assert [name for event in told for name in event.block_hashes][:full] == names
    assert [token for event in told for token in event.token_ids][: full * BLOCK] == tokens[: full * BLOCK]
    assert set(names) <= hbm(snapshot(instance.url))
    assert chat(instance, text) == (len(tokens) - 1) // BLOCK * BLOCK


def test_decoded_blocks_are_told_as_children_of_the_prompt(instance: Instance, tiny_llama: Path) -> None:
    text = text_about("tides")
    tokens = chat_tokens(tiny_llama, text)
    before = stats(instance.url)
    chat(instance, text, new_tokens=5 * BLOCK)
    batches = replay(before.events.replay_endpoint, before.events.seq + 1)
    told = [event for _, events in batches for event in events if isinstance(event, BlockStored)]
    all_tokens = [token for event in told for token in event.token_ids]
    assert all_tokens[: len(tokens)] == tokens
    assert len(all_tokens) > len(tokens) + BLOCK
    assert block_names(before.identity, all_tokens) == [name for event in told for name in event.block_hashes]


def test_the_snapshot_equals_the_replayed_events(instance: Instance) -> None:
    chat(instance, text_about("bridges"))
    state = snapshot(instance.url)
    batches = replay(stats(instance.url).events.replay_endpoint)
    assert [seq for seq, _ in batches] == list(range(len(batches)))
    assert held_after([batch for batch in batches if batch[0] <= state.seq]) == hbm(state)


def test_salts_keep_tenants_apart_in_the_cache_and_in_the_names(instance: Instance, tiny_llama: Path) -> None:
    text = text_about("salt mines")
    identity = stats(instance.url).identity
    tokens = chat_tokens(tiny_llama, text)
    reusable = (len(tokens) - 1) // BLOCK * BLOCK
    tenants = (None, "acme", "umbra")
    for salt in tenants:
        assert chat(instance, text, salt=salt) == 0, salt
    for salt in tenants:
        assert chat(instance, text, salt=salt) == reusable, salt
    held = hbm(snapshot(instance.url))
    names = [set(block_names(identity, tokens, salt=salt or "")) for salt in tenants]
    assert all(each <= held for each in names)
    assert not names[0] & names[1]
    assert not names[1] & names[2]


ROUTES = {
    "chat, streamed": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "stream": True},
    ),
    "completions": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 2}),
    "completions, streamed": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 2, "stream": True}),
    "completions, several prompts": (
        "/v1/completions",
        lambda text: {"prompt": [text, f"{text} And once more."], "max_tokens": 2},
    ),
    "responses": ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 2}),
    "messages": (
        "/v1/messages",
        lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    ),
    "generate": ("/generate", lambda text: {"prompt": text, "max_tokens": 2}),
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_salt_holds_on_every_route_that_generates(lmdeploy: Instance, route: str) -> None:
    instance = lmdeploy
    path, body = ROUTES[route]
    text = text_about(f"{route} and nothing else")

    def send(salt: str) -> tuple[int, int]:
        """Return how many prompt tokens were looked up, and how many were found."""
        before = stats(instance.url).prefix_cache
        answer = kv_events.post(
            instance.url + path,
            {"model": "m", "temperature": 0, **body(text)},
            {CACHE_SALT_HEADER: salt, "anthropic-version": "2023-06-01"},
        )
        assert answer.status == 200, answer
        after = stats(instance.url).prefix_cache
        return after.query_tokens - before.query_tokens, after.hit_tokens - before.hit_tokens

    before = hbm(snapshot(instance.url))
    queried, _ = send("acme")
    told = hbm(snapshot(instance.url)) - before
    assert queried > 4 * BLOCK
    assert told
    _, hits = send("acme")
    assert hits > 0
    named = hbm(snapshot(instance.url))
    _, hits_of_another = send("umbra")
    # prompts that share their beginning within one request may hit each other, never acme's
    assert len(hbm(snapshot(instance.url)) - named) == len(told)
    assert hits_of_another < hits


def test_concurrent_tenants_with_one_prompt_share_nothing(instance: Instance) -> None:
    text = text_about("a prompt that all tenants send at the same moment")
    with ThreadPoolExecutor(8) as tenants:
        cached = list(tenants.map(lambda number: chat(instance, text, salt=f"tenant-{number}"), range(8)))
        assert cached == [0] * 8
        cached = list(tenants.map(lambda number: chat(instance, text, salt=f"tenant-{number}"), range(8)))
        assert min(cached) > 0
    state = snapshot(instance.url)
    batches = replay(stats(instance.url).events.replay_endpoint)
    assert held_after([batch for batch in batches if batch[0] <= state.seq]) == hbm(state)


@pytest.mark.parametrize("salt", ["", "two words", "x" * 65])
def test_a_bad_salt_is_refused_in_openais_envelope(instance: Instance, salt: str) -> None:
    answer = kv_events.post(
        f"{instance.url}/v1/completions", {"model": "m", "prompt": "hello"}, {CACHE_SALT_HEADER: salt}
    )
    assert answer.status == 400
    assert answer.body["error"]["code"] == "invalid_cache_salt"


def test_stats_are_live(instance: Instance) -> None:
    first = stats(instance.url)
    expected = ("sim", "sim") if isinstance(instance, SimulatedInstance) else ("lmdeploy", "cpu")
    assert (first.engine, first.device, first.identity.model) == (*expected, "m")
    assert first.identity.block_size_tokens == BLOCK
    assert first.load.running == first.load.waiting == 0
    chat(instance, text_about("stations"))
    second = stats(instance.url)
    assert second.epoch == first.epoch
    assert second.events.seq > first.events.seq
    assert second.events.hook_errors == 0
    tier, before = second.tiers[CacheTier.HBM], first.tiers[CacheTier.HBM]
    assert before.cached_blocks < tier.cached_blocks <= tier.used_blocks <= tier.capacity_blocks
    assert tier.block_bytes > 0
    assert second.prefix_cache.query_tokens > first.prefix_cache.query_tokens


def test_the_instances_own_metrics_carry_our_series(instance: Instance) -> None:
    chat(instance, text_about("meters"))
    expected = stats(instance.url)
    deadline = time.monotonic() + 30
    while b"kvgate_engine_up 1.0" not in (page := kv_events.get(f"{instance.url}/metrics").raw):
        assert time.monotonic() < deadline
    text = page.decode()
    assert f"kvgate_engine_kv_events_seq {float(expected.events.seq)}" in text
    assert f'resident_blocks{{tier="HBM"}} {float(expected.tiers[CacheTier.HBM].cached_blocks)}' in text
    assert "kvgate_engine_kv_events_dropped_total 0.0" in text
    assert "kvgate_engine_hook_errors_total 0.0" in text


def test_choices_of_a_chat_are_counted_together(instance: Instance) -> None:
    more = {"messages": asked_about("choices"), "max_tokens": 5, "ignore_eos": True}
    single = tell(instance.url, CHAT, **more)
    whole = tell(instance.url, CHAT, **more, n=3)
    assert {place: reason for place, (_, reason) in choices(whole).items()} == dict.fromkeys(range(3), "length")
    assert choices(whole)[0] == choices(single)[0]
    prompt = single.body["usage"]["prompt_tokens"]
    counts = {"prompt_tokens": prompt, "completion_tokens": 15, "total_tokens": prompt + 15}
    assert whole.body["usage"] == whole.body["usage"] | counts
    streamed = tell(instance.url, CHAT, **more, n=3, stream=True, stream_options={"include_usage": True})
    assert choices(streamed) == choices(whole)
    assert streamed.events[-1]["usage"] == streamed.events[-1]["usage"] | counts
    assert {event["id"] for event in streamed.events} == {streamed.events[0]["id"]}
    several = tell(instance.url, COMPLETIONS, prompt="Choices", max_tokens=5, ignore_eos=True, n=3)
    assert (sorted(choices(several)), several.body["usage"]["completion_tokens"]) == ([0, 1, 2], 15)


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        (CHAT, {"n": 0}, "The n 0 must be a positive int."),
        (CHAT, {"n": 129}, "The n 129 exceeds the maximum supported choices (128)."),
        (CHAT, {"n": 2, "session_id": 4}, "n > 1 cannot be used with an explicit session_id."),
        (CHAT, {"max_tokens": 0}, "The max_tokens 0 must be a positive integer."),
        (CHAT, {"max_tokens": 8, "min_new_tokens": 9}, "min_new_tokens is 9; 0 to 8 are allowed"),
        (CHAT, {"min_new_tokens": -1}, "The min_new_tokens -1 cannot be a negative integer."),
        (COMPLETIONS, {"n": 0}, "The n 0 must be a positive int."),
        (COMPLETIONS, {"n": None}, "n is null; leave it out, or give a positive number"),
        (COMPLETIONS, {"max_tokens": 0}, "max_new_tokens must be at least 1, got 0."),
        (COMPLETIONS, {"prompt": []}, "prompt is an empty list; at least one prompt is required"),
        (GENERATE, {"max_tokens": 0}, "The max_tokens 0 must be a positive integer."),
        (GENERATE, {"stop": "a word that is no list"}, "Request preprocessing failed."),
        (GENERATE, {"stop_token_ids": [1024]}, "stop_token_ids holds 1024; token ids of 0 to 1023 are allowed"),
    ],
)
def test_what_answers_can_not_be_is_refused_alike(
    instance: Instance, path: str, more: dict[str, object], message: str
) -> None:
    prompt: dict[str, object] = {"messages": asked_about("refusals")} if path == CHAT else {"prompt": "Refusals"}
    answer = tell(instance.url, path, **(prompt | more))
    refused = {"message": message, "type": "invalid_request_error", "code": 400, "param": None, "object": "error"}
    assert (answer.status, answer.body) == (400, refused)


def test_a_stop_token_ends_an_answer_before_it(instance: Instance) -> None:
    more = {"prompt": text_about("stop tokens"), "max_tokens": 12}
    ids = tell(instance.url, GENERATE, **more, ignore_eos=True).body["output_ids"]
    place = max(map(ids.index, ids))
    stop = {"stop_token_ids": [ids[place]]}
    cut = tell(instance.url, GENERATE, **more, **stop).body
    assert cut["output_ids"] == ids[:place]
    assert (cut["meta_info"]["completion_tokens"], cut["meta_info"]["finish_reason"]) == (place, {"type": "stop"})
    events = tell(instance.url, GENERATE, **more, **stop, stream=True).events
    assert [token for event in events for token in event["output_ids"]] == ids[:place]
    assert "".join(event["text"] for event in events) == cut["text"]
    assert events[-1] == cut | {"text": "", "output_ids": []}
    shown = tell(instance.url, GENERATE, **more, **stop, include_stop_str_in_output=True).body
    assert (shown["output_ids"], shown["meta_info"]["completion_tokens"]) == (ids[: place + 1], place + 1)
    never = tell(instance.url, GENERATE, **more, **stop, ignore_eos=True).body
    assert (len(never["output_ids"]), ids[place] in never["output_ids"]) == (12, False)
    assert never["meta_info"]["finish_reason"] == {"type": "length"}


def test_a_stop_word_of_one_token_ends_an_answer_on_every_route(instance: Instance, tiny_llama: Path) -> None:
    tokenizer = SimTokenizer(tiny_llama)
    more = {"messages": asked_about("stop words"), "max_tokens": 12, "return_token_ids": True}
    ids = tell(instance.url, CHAT, **more, ignore_eos=True).body["choices"][0]["output_ids"]
    word, place = stop_in(tokenizer, ids)
    cut = tell(instance.url, CHAT, **more, stop=word)
    assert (cut.body["choices"][0]["output_ids"], choices(cut)[0][1]) == (ids[:place], "stop")
    assert cut.body["usage"]["completion_tokens"] == place
    assert choices(tell(instance.url, CHAT, **more, stop=[word], stream=True)) == choices(cut)
    late = tell(instance.url, CHAT, **more, stop=word, min_new_tokens=place + 1).body["choices"][0]["output_ids"]
    assert (late[:place], late[place] in tokenizer.stop_tokens(word)) == (ids[:place], False)
    said = tell(instance.url, MESSAGES, **more, stop_sequences=[word]).body
    assert (said["output_ids"], said["stop_reason"]) == (ids[:place], "end_turn")
    response = {"input": asked_about("stop words"), "max_output_tokens": 12, "stop": [word]}
    said = tell(instance.url, RESPONSES, **response).body
    assert (said["usage"]["output_tokens"], said["status"]) == (place, "completed")
    first = tell(instance.url, CHAT, **more, stop=[tokenizer.shown(ids[0])], n=2)
    assert set(choices(first).values()) >= {("", "stop")}
    prompt = {"prompt": text_about("stop words"), "max_tokens": 12}
    word, place = stop_in(tokenizer, tell(instance.url, GENERATE, **prompt, ignore_eos=True).body["output_ids"])
    for stream in (False, True):
        said = tell(instance.url, COMPLETIONS, **prompt, stop=word, stream=stream)
        assert choices(said)[0][1] == "stop"
    assert tell(instance.url, COMPLETIONS, **prompt, stop=[word]).body["usage"]["completion_tokens"] == place


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"messages": asked_about("shapes"), "return_token_ids": True}),
        (CHAT, {"messages": asked_about("shapes"), "n": 2}),
        (COMPLETIONS, {"prompt": "Shapes"}),
        (COMPLETIONS, {"prompt": ["Shapes", "More shapes"]}),
        (GENERATE, {"prompt": "Shapes"}),
        (MESSAGES, {"messages": asked_about("shapes")}),
        (RESPONSES, {"input": "Shapes"}),
    ],
)
def test_both_tell_answers_in_one_shape(
    lmdeploy: Instance, simulated: Instance, path: str, more: dict[str, object]
) -> None:
    asked = {"max_output_tokens" if path == RESPONSES else "max_tokens": 3, **more}
    if path != MESSAGES:  # which has no such field
        asked["ignore_eos"] = True
    usage = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    told = []
    for each in (lmdeploy, simulated):
        events = [shape(event) for event in tell(each.url, path, **asked, **usage, stream=True).events]
        once = [event for place, event in enumerate(events) if event not in events[:place]]
        told.append((shape(tell(each.url, path, **asked).body), once))
    assert told[0] == told[1]


def test_a_stuck_engine_is_a_503_in_bounded_time_and_comes_back(lmdeploy: Instance) -> None:
    instance = lmdeploy
    engine = instance.engine_process()
    engine.send_signal(signal.SIGSTOP)
    try:
        for path in ("/kv/v1/stats", "/kv/v1/snapshot"):
            answer = kv_events.get(instance.url + path, timeout_s=30)
            assert answer.status == 503
            assert "did not answer" in answer.body["error"]["message"]
        assert b"kvgate_engine_up 0.0" in kv_events.get(f"{instance.url}/metrics", timeout_s=30).raw
    finally:
        engine.send_signal(signal.SIGCONT)
    assert kv_events.get(f"{instance.url}/kv/v1/stats").status == 200


def test_a_killed_engine_answers_in_bounded_time_and_a_restart_is_a_new_epoch(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    monkeypatch.setenv("KVGATE_ENGINE_EVENTS_ENDPOINT", events)
    monkeypatch.setenv("KVGATE_ENGINE_REPLAY_ENDPOINT", replays)
    monkeypatch.setenv("KVGATE_ENGINE_CONTROL_ENDPOINT", f"ipc://{tmp_path}/control")
    text = text_about("phoenixes")
    with Instance.start(tiny_llama, tmp_path / "log") as instance:
        first = stats(instance.url)
        assert (first.events.endpoint, first.events.replay_endpoint) == (events, replays)
        chat(instance, text)
        held = hbm(snapshot(instance.url))
        assert held
        instance.engine_process().kill()
        started = time.monotonic()
        with contextlib.suppress(OSError):  # the instance as a whole may be gone before it can answer
            assert kv_events.get(f"{instance.url}/kv/v1/stats", timeout_s=30).status == 503
        assert time.monotonic() - started < 30
    with Instance.start(tiny_llama, tmp_path / "log") as instance:  # the same endpoints and socket
        second = stats(instance.url)
        assert second.epoch != first.epoch
        assert second.identity == first.identity
        assert (second.events.seq, hbm(snapshot(instance.url))) == (-1, set())
        assert chat(instance, text) == 0
        assert held <= hbm(snapshot(instance.url))


def test_an_events_port_in_use_ends_the_start_with_its_name(
    lmdeploy: Instance, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = stats(lmdeploy.url).events.endpoint
    monkeypatch.setenv("KVGATE_ENGINE_EVENTS_ENDPOINT", taken)
    second = Instance.start(tiny_llama, tmp_path / "log")
    try:
        assert second.process.wait(180) != 0
        assert f"can't bind {taken}: Address already in use" in second.output()
    finally:
        second.__exit__()
