"""The file that locust is given: ``locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --scenario chat``.

It needs locust, and kvgate's folder ``kvcontrol`` beside the folder that this file is in (or installed): pure Python,
whose ``kvcontrol.traces.synthesis`` makes the texts. The target needs ``/tokenize``, which kvgate's gateway has.
"""

import logging
import secrets
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import gevent
from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loadtests import users
from loadtests.exchange import Client, TargetError, only_model, words_of
from loadtests.scenario import Load, Scenario, ScenarioError, names, read_scenario
from loadtests.shape import spawned_per_s, users_at
from loadtests.tally import figures
from loadtests.users import STAGES, AgentUser, BatchUser, ChatUser, RagUser, Stage
from loadtests.verdict import broken

_log = logging.getLogger("loadtests")
_TIMEOUT_S = 300.0
_LOOK_UP_S = 30.0
_BROKEN = 1
_REFUSED = 2

# locust takes the classes that it finds here
_ = (ChatUser, AgentUser, RagUser, BatchUser)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument(
        "--scenario",
        default="chat",
        env_var="LOCUST_SCENARIO",
        help=f"who asks what: {', '.join(names())}, or the path of a .toml",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, env_var="LOCUST_SCALE", help="multiply all lengths of the scenario"
    )
    parser.add_argument(
        "--crowd", type=float, default=1.0, env_var="LOCUST_CROWD", help="multiply the scenario's numbers of users"
    )
    parser.add_argument(
        "--duration", type=float, default=None, env_var="LOCUST_DURATION", help="seconds; default: the scenario's"
    )
    parser.add_argument("--model", default="", env_var="LOCUST_MODEL", help="default: the only model served")
    parser.add_argument(
        "--api-key", default="", env_var="KVGATE_API_KEY", is_secret=True, help="the API key to present"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        env_var="LOCUST_SEED",
        help="the same number makes the same texts; default: others in each run (0 where there are workers)",
    )
    parser.add_argument(
        "--request-timeout", type=float, default=_TIMEOUT_S, env_var="LOCUST_REQUEST_TIMEOUT", help="seconds"
    )


class ScenarioShape(LoadTestShape):
    """The scenario's own numbers of users, times ``--crowd``, for its own time or ``--duration``."""

    def tick(self) -> tuple[int, float] | None:
        runner = self.runner
        if runner is None:
            return None
        options = _options(runner.environment)
        load = _load(_scenario(options), options)
        count = users_at(load, time.perf_counter() - self.start_time)
        return None if count is None else (count, spawned_per_s(load))


@events.init.add_listener  # type: ignore[untyped-decorator]
def _prepare(environment: Environment, runner: Any, web_ui: object, **_kept: object) -> None:
    if isinstance(runner, WorkerRunner):  # the master says which scenario, and which users
        return
    scenario = _scenario(_options(environment))
    present = [each for each in users.ALL if each.kind_name in scenario.kinds]
    for each in present:
        each.weight = scenario.kinds[each.kind_name].share
    environment.user_classes = list(present)
    if not environment.host or isinstance(runner, MasterRunner):
        return
    try:
        STAGES[environment] = _stage(environment, runner)
    except TargetError as error:
        if web_ui is None:
            _refuse(str(error))
        _log.warning("%s; it is tried again when a test is started on the page", error)


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _begin(environment: Environment, **_kept: object) -> None:
    """The host may have been named on locust's page alone, or by the master; it may have become ready only now."""
    stage, runner = STAGES.get(environment), environment.runner
    if runner is None or isinstance(runner, MasterRunner):
        return
    if stage is not None and (stage.url, stage.scenario) == (_url(environment), _scenario(_options(environment))):
        return
    STAGES.pop(environment, None)
    try:
        STAGES[environment] = _stage(environment, runner)
    except TargetError as error:
        _log.error("the test is stopped: %s", error)
        gevent.spawn(runner.stop)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _judge(environment: Environment, **_kept: object) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    scenario = _scenario(_options(environment))
    seen = figures(environment.stats)
    lines = list(broken(scenario.thresholds, seen))
    _log.info("%s: %s", scenario.name, seen)
    for line in lines:
        _log.error("threshold of scenario %s broken: %s", scenario.name, line)
    if not lines:
        _log.info("all thresholds of scenario %s hold", scenario.name)
    environment.process_exit_code = _BROKEN if lines else 0


def _url(environment: Environment) -> str:
    return (environment.host or "").rstrip("/")


def _stage(environment: Environment, runner: Any) -> Stage:
    """Look at the target, and return what users need to know of it; raises ``TargetError``."""
    options, url = _options(environment), _url(environment)
    scenario = _scenario(options)
    key = options.api_key or None
    client = Client(url, api_key=key, timeout_s=_LOOK_UP_S)
    model = options.model or only_model(client)
    client.close()
    words = words_of(url, model, api_key=key)
    context = words.context_tokens
    if context and scenario.least_tokens + words.message_tokens > context:
        raise TargetError(
            f"scenario {scenario.name} needs a context of {scenario.least_tokens + words.message_tokens} tokens, and "
            f"{model} has {context}: --scale {options.scale * context / scenario.least_tokens * 0.9:.3g} makes it fit"
        )
    seed = options.seed
    if seed is None:
        seed = secrets.randbelow(1 << 32) if isinstance(runner, LocalRunner) else 0
    return Stage(
        scenario=scenario,
        url=url,
        model=model,
        api_key=key,
        timeout_s=options.request_timeout,
        words=words,
        seed=seed,
        process=max(getattr(runner, "worker_index", 0), 0),
    )


_READ: dict[tuple[str, float], Scenario] = {}


def _options(environment: Environment) -> Namespace:
    """Return what was typed, or what the master was given."""
    return environment.parsed_options or Namespace()


def _scenario(options: Namespace) -> Scenario:
    """Return the scenario that the options name, read once; ends the process where there is none."""
    key = (options.scenario, options.scale)
    if key not in _READ:
        for name in ("scale", "crowd", "duration", "request_timeout"):
            value = getattr(options, name)
            if value is not None and not 0 < value < float("inf"):
                _refuse(f"--{name.replace('_', '-')} {value}: a number above 0 is allowed")
        try:
            _READ[key] = read_scenario(options.scenario).scaled(options.scale)
        except ScenarioError as error:
            _refuse(str(error))
    return _READ[key]


def _load(scenario: Scenario, options: Namespace) -> Load:
    load = replace(
        scenario.load,
        users=max(1, round(scenario.load.users * options.crowd)),
        peak=round(scenario.load.peak * options.crowd),
    )
    if options.duration is not None:
        load = replace(load, duration_s=options.duration)
    return load


def _refuse(why: str) -> NoReturn:
    _log.error("%s", why)
    sys.exit(_REFUSED)
