"""Instances and gateway started one by one, as on a fleet, and killed while requests run."""

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from kvgate.host.ports import free_ports
from tests.support.instance import Instance
from tests.support.processes import Running, eventually, kill_now, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LIMIT_S = 240.0
MODEL = "tiny-llama"


class Fleet:
    """Two instances and a gateway that can be stopped and started again, each on its port.

    The second instance is started as a person would; the first is killed, and started twice, and so is the gateway.
    """

    def __init__(self, stack: ExitStack, folder: Path, environment: dict[str, str]) -> None:
        self._stack = stack
        self._folder = folder
        self._environment = environment
        self._model = environment["KVGATE_CACHE_DIR"] + "/tiny-llama"
        self.ports = free_ports(3)
        self.killed = self.start_killed()
        engine = ["engine", "--model", self._model, "--port", str(self.ports[1]), "--kv-blocks", "512"]
        survivor = self._start(engine, "engine-1.log", {})
        self.gateway = self.start_gateway()
        self.killed.wait_healthy()
        survivor.until_healthy(f"http://127.0.0.1:{self.ports[1]}/health")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[2]}"

    def start_killed(self) -> Instance:
        options = ("--model-name", MODEL, "--num-gpu-blocks", "512")
        instance = Instance.start(Path(self._model), self._folder / "engine-0.log", *options, port=self.ports[0])
        self._stack.push(instance.__exit__)
        return instance

    def start_gateway(self) -> Running:
        instances = [f'{{"id": "engine-{index}", "url": "http://127.0.0.1:{self.ports[index]}"}}' for index in (0, 1)]
        settings = {
            "KVGATE_PORT": str(self.ports[2]),
            "KVGATE_INSTANCES": f"[{', '.join(instances)}]",
            "KVGATE_TOKENIZER": self._model,
            "KVGATE_STATE_DIR": str(self._folder / "state"),
        }
        return self._start([], "gateway.log", settings, module="gateway", warm=0)

    def until_usable(self, count: int) -> None:
        eventually(lambda: self.usable() == count, LIMIT_S, f"{count} usable instances")

    def usable(self) -> int:
        try:
            return int(httpx2.get(f"{self.url}/readyz", timeout=10.0, trust_env=False).json()["usable"])
        except httpx2.HTTPError:
            return -1

    def _start(self, arguments: list[str], log: str, settings: dict[str, str], **how: Any) -> Running:
        return self._stack.enter_context(running(arguments, self._folder / log, self._environment | settings, **how))


@pytest.fixture(scope="module")
def fleet(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path_factory.mktemp("fleet"), environment)
        fleet.until_usable(2)
        yield fleet


def ask(fleet: Fleet, text: str, max_tokens: int = 8) -> tuple[str, int, int]:
    """Return the instance that answered, the matched tokens, and the cached ones."""
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="sk-any", max_retries=0, timeout=LIMIT_S)
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=max_tokens, temperature=0
    )
    usage = raw.parse().usage
    assert usage is not None
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return raw.headers["x-kvgate-instance"], int(raw.headers["x-kvgate-matched-tokens"]), cached


def fresh() -> str:
    return f"{uuid.uuid4()} " + "the gateway knows who holds what " * 8


def test_a_gateway_that_starts_again_knows_what_the_instances_hold(fleet: Fleet) -> None:
    prompt = fresh()
    holder, _, _ = ask(fleet, prompt)
    eventually(lambda: ask(fleet, prompt)[1] > 0, LIMIT_S, "the gateway learns of the blocks")
    fleet.gateway.process.terminate()
    assert fleet.gateway.wait() == 0
    fleet.gateway = fleet.start_gateway()
    fleet.until_usable(2)
    instance, matched, cached = ask(fleet, prompt)
    assert instance == holder
    assert matched == cached > 0, "on the first repeat, from the instances' snapshots"


def test_an_instance_killed_under_load_hangs_no_request_and_comes_back(fleet: Fleet) -> None:
    enough = threading.Event()

    def keep_asking(_: int) -> tuple[int, list[str]]:
        """Ask until told to stop; return how many were answered, and the errors of those that weren't."""
        answered, failed = 0, []
        while not enough.is_set():
            try:
                ask(fleet, fresh(), max_tokens=32)
                answered += 1
            except openai.APIStatusError as error:
                failed.append(f"{error.status_code} {error.message}")
        return answered, failed

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(keep_asking, number) for number in range(8)]
        try:
            eventually(lambda: busy(fleet, 0), LIMIT_S, "the instance has work")
            kill_now(fleet.killed.process.pid)
            eventually(lambda: fleet.usable() == 1, LIMIT_S, "the gateway has noticed")
            assert {ask(fleet, fresh())[0] for _ in range(6)} == {"engine-1"}
        finally:
            enough.set()
        results = [each.result(LIMIT_S) for each in work]
    assert sum(answered for answered, _ in results) > 0
    failures = [error for _, errors in results for error in errors]
    assert failures == [], "nothing had been sent of these answers, so the other instance gives them"

    fleet.killed.process.wait(LIMIT_S)
    fleet.killed = fleet.start_killed()
    fleet.until_usable(2)
    eventually(lambda: ask(fleet, fresh())[0] == "engine-0", LIMIT_S, "requests go to the instance that returned")


def busy(fleet: Fleet, index: int) -> bool:
    stats = httpx2.get(f"http://127.0.0.1:{fleet.ports[index]}/kv/v1/stats", timeout=LIMIT_S, trust_env=False)
    return bool(stats.json()["load"]["running"])
