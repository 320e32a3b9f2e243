"""``python -m engines.sim``: serve a simulated engine."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import uvicorn

from engines.events.publisher import EndpointError
from engines.sim.behaviour import LEAST_FACTOR, MOST_FACTOR, Behaviour
from engines.sim.faults import Faults
from engines.sim.instance import InstanceSpec, SimInstance
from engines.sim.pacing import AT_ONCE
from engines.sim.profile import SHAPE_LIMITS, EngineShape, ProfileError, load_profile, shipped
from engines.sim.server import Server
from engines.sim.text import SimTokenizer, TextError
from kvcontrol.kv_runtime import ArenaError
from kvcontrol.scheduler_ir.pacing import PACES

Number = TypeVar("Number", int, float)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="kvgate sim", description="Serve a simulated engine.")
    made.add_argument("--model", type=Path, required=True, help="a model folder; only its tokenizer is read")
    made.add_argument("--model-name", help="model name for clients; default: the folder's name")
    made.add_argument("--profile", default="h100-7b", help=f"{', '.join(shipped())}, or a file; default: h100-7b")
    made.add_argument("--host", default="127.0.0.1", help="where to listen; default: 127.0.0.1")
    made.add_argument("--port", type=_within(int, 1, 65_535), required=True, help="the HTTP port")
    made.add_argument("--events", default="tcp://127.0.0.1:*", help="endpoint of the KV events; default: a free port")
    made.add_argument("--replay", default="tcp://127.0.0.1:*", help="endpoint that replays them; default: a free port")
    made.add_argument("--seed", type=int, default=0, help="another seed, other answers, jitter and faults; default: 0")
    made.add_argument(
        "--jitter", type=_within(float, 0, 1), default=0.0, help="spread of steps' times, 0 to 1; default: 0"
    )
    made.add_argument(
        "--answer-tokens",
        type=_within(int, 1, 1 << 30),
        default=128,
        help="default answer length in tokens; default: 128",
    )
    sizes = made.add_argument_group("sizes, where they differ from the profile's")
    sizes.add_argument(
        "--block-tokens",
        type=_within(int, *SHAPE_LIMITS["block_tokens"]),
        help="cut the same memory into blocks of so many tokens",
    )
    for name in ("hbm-blocks", "ddr-blocks", "nvme-blocks", "max-batch", "context-tokens"):
        sizes.add_argument(f"--{name}", type=_within(int, *SHAPE_LIMITS[name.replace("-", "_")]))
    sizes.add_argument("--pace", help=f"{', '.join((AT_ONCE, *PACES))}, with parameters in brackets")
    sizes.add_argument("--policy", help="the eviction policy of HBM")
    sizes.add_argument("--tier-policy", help="the eviction policy of the tiers below")
    faults = made.add_argument_group("faults")
    faults.add_argument(
        "--slow", type=_within(float, LEAST_FACTOR, MOST_FACTOR), default=1.0, help="factor on all times"
    )
    faults.add_argument("--refuse", type=_within(float, 0, 1), default=0.0, help="share of requests that get a 503")
    faults.add_argument("--die", type=_within(float, 0, 1), default=0.0, help="share of streams that break off")
    faults.add_argument(
        "--lose-events", type=_within(float, 0, 1), default=0.0, help="share of KV events that are dropped"
    )
    faults.add_argument(
        "--corrupt", type=_within(float, 0, 1), default=0.0, help="share of blocks that come wrong from below HBM"
    )
    faults.add_argument(
        "--capacity-lie",
        type=_within(float, LEAST_FACTOR, MOST_FACTOR),
        default=1.0,
        help="factor on the capacity that is reported",
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal stops it; return 1, after a message, for invalid arguments."""
    chosen = parser().parse_args(arguments)
    try:
        profile = load_profile(chosen.profile)
        profile = replace(profile, engine=_shape(profile.engine, chosen))
        faults = Faults(
            slow=chosen.slow,
            refuse=chosen.refuse,
            die=chosen.die,
            lose_events=chosen.lose_events,
            corrupt=chosen.corrupt,
            capacity_lie=chosen.capacity_lie,
        )
        Behaviour(jitter=chosen.jitter)  # refuses invalid values before anything is opened
        tokenizer = SimTokenizer(chosen.model)
        instance = SimInstance(
            InstanceSpec(
                profile=profile,
                model=chosen.model_name or chosen.model.name,
                seed=chosen.seed,
                jitter=chosen.jitter,
                faults=faults,
                events_endpoint=chosen.events,
                replay_endpoint=chosen.replay,
            )
        )
    except (ProfileError, TextError, EndpointError, ArenaError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    app = Server(instance, tokenizer, answer_tokens=chosen.answer_tokens).app()
    uvicorn.run(app, host=chosen.host, port=chosen.port, log_level="warning", timeout_graceful_shutdown=5)
    return 0


def _within(kind: type[Number], least: float, most: float) -> Callable[[str], Number]:
    """Return what reads a number and refuses one that is not within bounds, both included."""

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not allowed; allowed is {least:,} to {most:,}")
        return value

    return read


def _shape(shape: EngineShape, chosen: argparse.Namespace) -> EngineShape:
    if chosen.block_tokens is not None:
        shape = shape.with_block_tokens(chosen.block_tokens)
    names = ("hbm_blocks", "ddr_blocks", "nvme_blocks", "max_batch", "context_tokens", "pace", "policy", "tier_policy")
    return replace(shape, **{name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None})


if __name__ == "__main__":
    sys.exit(main())
