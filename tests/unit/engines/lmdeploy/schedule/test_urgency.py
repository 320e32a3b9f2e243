"""How urgent a request is, from the gateway's headers to what LMDeploy keeps of it."""

import json
import pickle
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from engines.lmdeploy.schedule import urgency
from engines.lmdeploy.schedule.urgency import CARRIED_URGENCY
from engines.requests.headers import HeaderMiddleware
from engines.requests.urgency import ORDINARY, URGENCY, Urgency, UrgencyError, urgency_of_headers
from gateway.upstream.urgency import urgency_headers
from kvcontrol.core.priority import Priority
from kvcontrol.core.priority import Priority as GatewayPriority

PRIORITY = b"x-kvgate-priority"
DEADLINE = b"x-kvgate-deadline-ms"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], ORDINARY),
        ([(b"priority", b"high")], ORDINARY),
        ([(b"X-KVGATE-Priority", b"high")], Urgency(priority=Priority.HIGH)),
        ([(DEADLINE, b"1500")], Urgency(first_token_s=1.5)),
        ([(PRIORITY, b"low"), (DEADLINE, b"0")], Urgency(priority=Priority.LOW, first_token_s=0.0)),
    ],
)
def test_the_headers_say_the_class_and_in_how_long_the_first_token_is_due(
    headers: list[tuple[bytes, bytes]], expected: Urgency
) -> None:
    assert urgency_of_headers(headers) == expected


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([(PRIORITY, b"HIGH")], "x-kvgate-priority is none of high, normal, low"),
        ([(PRIORITY, b"")], "is none of"),
        ([(PRIORITY, b"high"), (PRIORITY, b"low")], "x-kvgate-priority is given 2 times"),
        *[
            ([(DEADLINE, bad)], "x-kvgate-deadline-ms is not a whole number of milliseconds from 0 to 86400000")
            for bad in (b"", b"-1", b"1.5", b"soon", b"86400001", b"9" * 400, "²".encode())
        ],
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(headers: list[tuple[bytes, bytes]], why: str) -> None:
    with pytest.raises(UrgencyError, match=why):
        urgency_of_headers(headers)


@pytest.mark.parametrize("priority", list(GatewayPriority))
@pytest.mark.parametrize("due_in_s", [-3.0, 0.0, 0.0004, 12.3456])
def test_the_engine_reads_what_the_gateway_writes(priority: GatewayPriority, due_in_s: float) -> None:
    headers = urgency_headers(priority, due_in_s=due_in_s)
    read = urgency_of_headers(list(headers))
    assert read.priority is priority
    assert read.first_token_s == pytest.approx(max(0.0, due_in_s), abs=0.0006)


class Config:
    """Stands where LMDeploy's ``GenerationConfig`` does: what matters here is an attribute."""

    def __init__(self) -> None:
        CARRIED_URGENCY.generation_config_post_init(lambda _: None)(self)


class Param:
    @classmethod
    def from_gen_config(cls, gen_config: Any) -> "Param":
        del gen_config
        return cls()


class Sequence:
    def __init__(self, param: Any) -> None:
        self.sampling_param = param


async def served(headers: list[tuple[bytes, bytes]]) -> tuple[list[Any], list[MutableMapping[str, Any]]]:
    made: list[Any] = []
    sent: list[MutableMapping[str, Any]] = []

    async def app(_scope: Any, _receive: Callable[[], Awaitable[Any]], _send: Callable[[Any], Awaitable[None]]) -> None:
        made.append(Config())

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": headers}
    await HeaderMiddleware(app, URGENCY)(scope, receive, send)
    return made, sent


async def test_it_travels_to_the_engine_process_and_ends_with_the_request() -> None:
    urgent = [(PRIORITY, b"high"), (DEADLINE, b"250")]
    made, _ = await served(urgent)
    hook = CARRIED_URGENCY.sampling_param_from_gen_config(vars(Param)["from_gen_config"])
    param = hook.__get__(None, Param)(pickle.loads(pickle.dumps(made[0])))  # noqa: S301 - what LMDeploy does
    assert urgency.urgency_of_sequence(Sequence(param)) == Urgency(priority=Priority.HIGH, first_token_s=0.25)
    made, _ = await served([])
    assert not hasattr(made[0], "kvgate_urgency")
    assert urgency.urgency_of_sequence(Sequence(Param())) is ORDINARY
    assert urgency.urgency_of_sequence(Sequence(hook.__get__(None, Param)(made[0]))) is ORDINARY


async def test_a_bad_header_is_answered_400_in_openais_envelope() -> None:
    made, sent = await served([(PRIORITY, b"urgent")])
    assert not made
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert (error["param"], error["code"]) == ("x-kvgate-priority", "invalid_urgency")
