"""One run: a trace asked of a running target, from its options to its report."""

import asyncio
import json
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from gateway.errors import SettingsError
from kvcontrol.traces import Ask, SynthesisError, TokenCount, Words, learn_words
from kvgate.display import errors
from kvgate.failure import CommandError
from lab.driver.answer import Answer
from lab.driver.chats import Chats
from lab.driver.drive import Driver
from lab.driver.live import LiveView
from lab.driver.options import HttpReplay
from lab.driver.summary import Goals, Price, Setting, summarize, warnings
from lab.driver.target import Target, named_model, now_s, tier_tokens, usable_instances, words_of
from lab.driver.work import Work, plan
from lab.files import write_whole
from lab.report import Report
from lab.traces import Request, TraceError, read_requests

_SETTLING_S = 0.25
"""A gateway settles a request in its metrics just after the answer's last byte."""
_MANY_FILES = 65_536
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a replay: the report, what it is made of, and whether it was stopped."""

    report: Report
    answers: Sequence[Answer]
    setting: Setting
    interrupted: bool


def replay_http(trace: Path, options: HttpReplay) -> Replayed:
    """Drive the target. Ctrl-C ends it early and the report is of what was done. Raises ``CommandError``."""
    options.check()
    try:
        requests = read_requests(trace)
    except TraceError as error:
        raise CommandError(
            str(error), "traces of Mooncake's, Azure's and the agentic format can be replayed"
        ) from error
    except OSError as error:
        raise CommandError(f"can't read {trace}: {error.strerror or error}") from error
    if options.out is not None:
        _make_folder(options.out)
    _allow_many_connections()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(drive(trace, requests[: options.limit], options))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.Loop


async def drive(trace: Path, requests: Sequence[Request], options: HttpReplay) -> Replayed:
    """Drive the target with these requests, on the event loop that runs. Raises ``CommandError``."""
    target = Target(
        url=(options.target or "").rstrip("/"),
        model=options.model or "",
        api_key=options.api_key,
        metrics_key=options.metrics_key,
        timeout_s=options.timeout or _TIMEOUT_S,
    )
    limits = aiohttp.ClientTimeout(total=None, sock_connect=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, trust_env=False) as session:
        if not target.model:
            target = replace(target, model=await named_model(session, target))
        words = _local_words(options.tokenizer) if options.tokenizer else await words_of(session, target)
        work = plan(
            requests,
            words,
            lengths=options.lengths,
            pace=options.pace,
            seed=options.seed or 0,
        )
        price = None
        if options.gpu_hour_usd is not None:
            instances = options.instances or await usable_instances(session, target)
            if instances is None:
                raise CommandError(f"{target.url} doesn't say how many instances it has", "say so: --instances N")
            price = Price(usd_per_hour=options.gpu_hour_usd, instances=instances)
        before = await tier_tokens(session, target)
        answers, setting, interrupted = await _driven(session, target, work, options)
        await asyncio.sleep(_SETTLING_S)
        found = await _found_since(session, target, before)
    setting = replace(
        setting,
        how=options.how(trace, target.model),
        price=price,
        tier_tokens=found,
    )
    return Replayed(report=summarize(answers, setting), answers=answers, setting=setting, interrupted=interrupted)


async def _found_since(
    session: aiohttp.ClientSession, target: Target, before: Mapping[str, float] | None
) -> Mapping[str, float] | None:
    """Return what the gateway found meanwhile, by tier; None where it can't say: it ended, began anew, or wants
    another key.
    """
    try:
        after = await tier_tokens(session, target)
    except CommandError:
        return None
    if before is None or after is None or any(after.get(tier, 0.0) < tokens for tier, tokens in before.items()):
        return None
    return {tier: tokens - before.get(tier, 0.0) for tier, tokens in sorted(after.items())}


async def _driven(
    session: aiohttp.ClientSession, target: Target, work: Work, options: HttpReplay
) -> tuple[list[Answer], Setting, bool]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    begin_s, cpu_s = now_s(), time.process_time()

    def clock() -> float:
        return now_s() - begin_s

    driver = Driver(work, Chats(session, target, clock), clock, duration_s=options.duration, stop=stop)
    pace = options.pace
    try:
        async with LiveView(errors, driver.run, clock).shown():
            await (driver.open_loop() if pace.users is None else driver.closed_loop(pace))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    setting = Setting(
        how="",
        block_tokens=work.block_tokens,
        elapsed_s=driver.run.ended_s,
        planned=len(work.requests),
        left_out=work.left_out,
        template_tokens=work.template_tokens,
        open_loop=pace.users is None,
        driver_cpu_s=time.process_time() - cpu_s,
        goals=Goals(ttft_s=options.slo_ttft, itl_s=options.slo_itl),
    )
    return driver.run.answers, setting, stop.is_set()


def _context_of(folder: Path) -> int | None:
    """Return the most positions that a model folder's ``config.json`` names; None where it names none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return positions if isinstance(positions, int) and positions > 0 else None


def _local_words(folder: Path) -> Words:
    """Learn from a model folder what is one token, and the longest context that its ``config.json`` allows."""
    from gateway.fingerprint.tokenizer import load_tokenizer

    if not folder.is_dir():
        raise CommandError(f"--tokenizer {folder}: no such folder")
    try:
        tokenizer = load_tokenizer(folder)
    except SettingsError as error:
        raise CommandError(f"--tokenizer {folder}: {error}") from error

    context_tokens = _context_of(folder)

    def told(ask: Ask) -> TokenCount:
        text = tokenizer.render([{"role": "user", "content": ask.text}], {}) if ask.as_message else ask.text
        ids = tokenizer.token_ids(text, special=ask.as_message)
        return TokenCount(count=len(ids), spelled=tokenizer.token_texts(ids), context_tokens=context_tokens)

    learning = learn_words()
    try:
        ask = next(learning)
        while True:
            ask = learning.send(told(ask))
    except StopIteration as done:
        words: Words = done.value
        return words
    except SynthesisError as error:
        raise CommandError(f"--tokenizer {folder}: {error}") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {folder}: {error.strerror or error}") from error


def _allow_many_connections() -> None:
    """An open loop holds as many connections as requests run: raise this process's soft limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def write_report(replayed: Replayed, folder: Path) -> list[Path]:
    """Write the report's files into a folder that exists, the picture where matplotlib is; return their paths."""
    from importlib.util import find_spec

    written = [folder / "report.json", folder / "report.md"]
    try:
        write_whole(written[0], f"{replayed.report.as_json()}\n".encode())
        write_whole(written[1], f"# {replayed.setting.how}\n\n{replayed.report.as_markdown()}\n".encode())
    except OSError as error:
        raise CommandError(f"--out {folder}: {error.strerror or error}") from error
    if find_spec("matplotlib") is None:
        errors.print("  no picture: pip install 'kvgate[plot]' brings what draws it", markup=False, soft_wrap=True)
    else:
        draw_report(replayed, folder / "report.png")
        written.append(folder / "report.png")
    return written


def draw_report(replayed: Replayed, file: Path) -> None:
    """Write the picture alone; raises ``CommandError``."""
    from lab.driver.picture import draw

    draw(replayed.answers, replayed.setting, file=file)


def say_warnings(replayed: Replayed) -> None:
    """Print what keeps the figures from meaning what they seem to."""
    for warning in warnings(replayed.answers, replayed.setting):
        errors.print(f"  {warning}", markup=False, soft_wrap=True)
