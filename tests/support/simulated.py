"""Simulated engines of a few blocks, and what their requests come to."""

from collections.abc import Sequence
from dataclasses import replace

from engines.sim.behaviour import Behaviour
from engines.sim.engine import SimEngine
from engines.sim.profile import EngineShape, Links, Profile
from engines.sim.sequence import SimRequest, SimSequence
from engines.sim.sink import BlockSink
from engines.sim.timing import TimeModel
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import HASH_BYTES, child_hash
from kvcontrol.core.ids import BlockHash
from kvcontrol.prefix_reuse import PromptChain

BLOCK = 4
ROOT = BlockHash(bytes(HASH_BYTES))
TIME = TimeModel(
    step_s=0.05,
    token_s=0.001,
    pair_s=1e-5,
    context_s=1e-5,
    decode_step_s=0.02,
    sequence_s=0.002,
    decode_context_s=1e-4,
)
LINKS = Links(
    hbm_to_ddr_bytes_per_s=1e6,
    ddr_to_hbm_bytes_per_s=1e6,
    ddr_to_nvme_bytes_per_s=5e5,
    nvme_to_ddr_bytes_per_s=5e5,
)


def small_profile(**engine: object) -> Profile:
    """64 blocks of 4 tokens, a batch of 4."""
    shape = EngineShape(
        block_tokens=BLOCK,
        block_bytes=100,
        kv_dtype="float32",
        hbm_blocks=64,
        max_batch=4,
        max_prefill_tokens=32,
        context_tokens=4096,
        policy="lru",
    )
    return Profile(
        name="small",
        summary="",
        source="",
        engine=replace(shape, **engine),  # type: ignore[arg-type]
        links=LINKS,
        time=TIME,
    )


def chain(contents: Sequence[int]) -> PromptChain:
    """The path of full blocks with these contents."""
    path = PromptChain(ROOT, block_size_tokens=BLOCK, source=lambda *_: b"")
    parent: BlockHash = ROOT
    for content in contents:
        block = content.to_bytes(4 * BLOCK, "little")
        parent = child_hash(parent, block)
        path.keys.append(parent)
        path.block_tokens.append(block)
    return path


def request(
    name: str, contents: Sequence[int], *, more: int = 1, output: int = 1, answer: Sequence[int] = ()
) -> SimRequest:
    """A prompt of these blocks and ``more`` tokens; ``answer`` are blocks that decoding goes on with."""
    return SimRequest(
        request_id=name,
        chain=chain([*contents, *answer]),
        prompt_tokens=len(contents) * BLOCK + more,
        output_tokens=output,
    )


class Listening:
    """Writes down what a listener hears; ``moments`` are those of each token where an engine streams."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.moments: dict[str, list[float]] = {}
        self.over: list[SimSequence] = []

    def produced(self, sequence: SimSequence, tokens: int, now_s: float) -> None:
        name = sequence.request.request_id
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        self.moments.setdefault(name, []).append(now_s)

    def ended(self, sequence: SimSequence, now_s: float) -> None:
        assert sequence.ended_s == now_s
        self.over.append(sequence)


class Mirror:
    """What a subscriber believes to be where."""

    def __init__(self) -> None:
        self.held: dict[CacheTier, dict[BlockHash, BlockHash | None]] = {}

    def stored_all(
        self, blocks: Sequence[tuple[BlockHash, BlockHash | None, bytes]], *, tier: CacheTier, adapter: str = ""
    ) -> None:
        del adapter
        self.held.setdefault(tier, {}).update({block: parent for block, parent, _ in blocks})

    def removed_all(self, blocks: Sequence[BlockHash], *, tier: CacheTier) -> None:
        for block in blocks:
            del self.held[tier][block]

    def cleared(self) -> None:
        self.held.clear()


def engine(
    listener: Listening,
    *,
    stream: bool = False,
    behaviour: Behaviour | None = None,
    sink: BlockSink | None = None,
    profile: Profile | None = None,
    **shape: object,
) -> SimEngine:
    return SimEngine(
        profile or small_profile(**shape), listener=listener, stream=stream, behaviour=behaviour, sink=sink
    )


def run(engine: SimEngine, requests: Sequence[tuple[float, SimRequest]]) -> list[SimSequence]:
    """Serve requests that come at these times to their ends."""
    sequences = [engine.submit(each, at_s) for at_s, each in requests]
    finish(engine)
    return sequences


def finish(engine: SimEngine, *, most_events: int = 100_000) -> None:
    for _ in range(most_events):
        if engine.idle:
            return
        engine.advance(engine.next_event_s)
    raise AssertionError(f"not done after {most_events} events")


__all__ = [
    "BLOCK",
    "LINKS",
    "TIME",
    "Listening",
    "Mirror",
    "chain",
    "engine",
    "finish",
    "request",
    "run",
    "small_profile",
]
