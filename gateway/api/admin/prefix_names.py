"""The block hashes of an operator's prefix for each instance, and the selected instances."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from gateway.admission import Authenticator
from gateway.api.admin.prompts import PromptBody, check_model, check_one, fingerprint_of
from gateway.errors import InvalidRequestError, NoInstanceError, NotFoundError
from gateway.fingerprint import Fingerprint, Fingerprinter, Gap
from gateway.fingerprint.fingerprint import KnownBlocks
from gateway.fleet.pins import Chain, layout_of
from gateway.placement.planner import Planner
from gateway.placement.separation import RequestSize
from gateway.registry import Instance, InstanceState, Registry
from gateway.state.bodies import NAME_PATTERN
from gateway.types import TenantId
from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.core.tier_control import MOST_BLOCKS
from kvcontrol.prefix_reuse import FleetIndex

HASH_PATTERN: Final = rf"^[0-9a-f]{{{2 * HASH_BYTES}}}$"
_ID_BYTES: Final = 12
_RETRY_AFTER_S: Final = 2


class PrefixBody(PromptBody):
    """A prefix: a prompt in one of its forms, or the hash of its last block."""

    hash: Annotated[str, StringConstraints(pattern=HASH_PATTERN)] | None = Field(
        None, description="Its last block's, as /kv/v1 has it; tenant is only noted then."
    )
    instances: list[Annotated[str, StringConstraints(pattern=NAME_PATTERN)]] | None = Field(
        None, min_length=1, max_length=1000, description="The selected instances."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Selected instances with pins, and those without, each with a reason."""

    able: tuple[Instance, ...]
    skipped: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrefix:
    """``name`` is the same whenever the same prefix is meant; ``hashes`` are its blocks where they are named so.

    ``tokens`` are those of a last block that is not full, too.
    """

    name: str
    tokens: int
    fingerprint: Fingerprint
    hashes: Callable[[Instance], Sequence[BlockHash]]

    def chain(self, instance: Instance) -> Chain:
        """Return its blocks by the names that an instance has for them."""
        return tuple(each.hex() for each in self.hashes(instance))


class PrefixNames:
    """Reads bodies; calls no instance."""

    def __init__(
        self,
        *,
        registry: Registry,
        index: FleetIndex,
        planner: Planner,
        fingerprinter: Fingerprinter,
        authenticator: Authenticator,
    ) -> None:
        self._registry = registry
        self._index = index
        self._planner = planner
        self._fingerprinter = fingerprinter
        self._authenticator = authenticator

    async def read(self, body: PrefixBody, *, whole: bool) -> NamedPrefix:
        """Return the prefix of a body. ``whole``: a hash stands for all its ancestors, too. Raises ``ApiError``."""
        check_model(body, self._registry)
        check_one(body, "hash")
        if body.hash is not None:
            return self._of_hash(body.model, body.hash, whole=whole)
        salt = self._authenticator.salt(TenantId(body.tenant))
        fingerprint = await fingerprint_of(body, self._fingerprinter, salt)
        if isinstance(fingerprint, Gap) or fingerprint.gap is not None:
            gap = fingerprint if isinstance(fingerprint, Gap) else fingerprint.gap
            raise InvalidRequestError(
                f"the gateway can't name the blocks of this prompt ({gap}); give the hash of its last block",
                param="prompt",
                code="prompt_not_named",
            )

        def hashes(instance: Instance) -> Sequence[BlockHash]:
            return () if instance.stats is None else fingerprint.hashes(instance.stats.identity)

        return NamedPrefix(
            name=_name(fingerprint.beginning(fingerprint.tokens)),
            tokens=fingerprint.tokens,
            fingerprint=fingerprint,
            hashes=hashes,
        )

    def candidates(self, body: PrefixBody, prefix: NamedPrefix) -> Candidates:
        """Return the selected instances with pins; raises ``ApiError`` if there are none."""
        every = {str(each.id): each for each in self._registry.all()}
        if unknown := sorted(set(body.instances or ()) - every.keys()):
            raise InvalidRequestError(
                f"instances: unknown instance {', '.join(unknown)}; known: {', '.join(every) or 'none'}",
                param="instances",
            )
        able: list[Instance] = []
        skipped: dict[str, str] = {}
        unfit: dict[str, str] = {}
        for name, instance in every.items():
            if body.instances is not None and name not in body.instances:
                continue
            if body.instances is None and not instance.serves(body.model):
                continue
            if why := _unable(instance, body.model):
                skipped[name] = why
            elif why := _unfit(prefix, instance):
                skipped[name] = unfit[name] = why
            else:
                able.append(instance)
        if not able:
            why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items()) or f"none serves {body.model!r}"
            if unfit and body.hash is None:
                raise InvalidRequestError(f"no instance can identify this prefix ({why})", param="prompt")
            raise NoInstanceError(f"no instance can take this prefix now ({why})", retry_after_s=_RETRY_AFTER_S)
        return Candidates(able=tuple(able), skipped=skipped)

    def holders(self, prefix: NamedPrefix, able: Sequence[Instance]) -> tuple[Instance, ...]:
        """Return all instances with the whole prefix, else the one that routing would choose for it."""
        whole = tuple(each for each in able if self._held(prefix, each) >= len(prefix.hashes(each)))
        if whole:
            return whole
        usable = self._registry.available.usable(prefix.fingerprint.model)
        among = [each for each in usable if each.id in {one.id for one in able}]
        if not among:
            return (max(able, key=lambda each: self._held(prefix, each)),)
        size = RequestSize(request_id="pinned", prompt_tokens=prefix.tokens, max_tokens=1, separable=False)
        chosen = self._planner.consider(prefix.fingerprint, among, session=None, size=size).instance
        return tuple(each for each in able if each.id == chosen.id)

    def layouts(self, prefix: NamedPrefix, able: Sequence[Instance]) -> dict[str, str]:
        """Return the chains of all layouts that instances have, as a ``PinBody`` keeps them."""
        return {
            layout_of(each.stats.identity, prefix.fingerprint.model): "".join(prefix.chain(each))
            for each in able
            if each.stats is not None
        }

    def _held(self, prefix: NamedPrefix, instance: Instance) -> int:
        match = self._index.match(prefix.hashes(instance)).get(instance.id)
        return 0 if match is None else match.blocks

    def _of_hash(self, model: str, text: str, *, whole: bool) -> NamedPrefix:
        block = BlockHash(bytes.fromhex(text))
        path = self._index.lineage(block) if whole else [block]
        if not path:
            raise NotFoundError(
                f"no instance is known to hold the block {text}; give the prompt itself", code="block_not_found"
            )
        holding: set[InstanceId] = set(self._index.match([block])) if whole else set()
        sizes = [each.stats.identity.block_size_tokens for each in self._registry.all() if each.stats is not None]
        known = KnownBlocks(path, model=model, block_size_tokens=max(sizes, default=1))

        def hashes(instance: Instance) -> Sequence[BlockHash]:
            return path if not whole or instance.id in holding else ()

        return NamedPrefix(
            name=_name(model.encode() + block), tokens=known.tokens - 1, fingerprint=known, hashes=hashes
        )


def _name(content: bytes) -> str:
    return blake2b(content, digest_size=_ID_BYTES, person=b"kvgate.pin").hexdigest()


def _unfit(prefix: NamedPrefix, instance: Instance) -> str:
    blocks = len(prefix.hashes(instance))
    if not blocks:
        return f"{prefix.tokens} tokens fill no block that could be found again"
    return f"it is {blocks} blocks long; at most {MOST_BLOCKS} can be named" if blocks > MOST_BLOCKS else ""


def _unable(instance: Instance, model: str) -> str:
    if instance.state is not InstanceState.HEALTHY:
        return f"it is {instance.state}: {instance.reason}"
    if not instance.serves(model):
        return f"it doesn't serve {model!r}"
    if instance.stats is None:
        return "it has no /kv/v1"
    return ""
