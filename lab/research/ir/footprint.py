"""How many tokens' KV each device holds, where requests that share a beginning hold it once.

Counted in segments: stretches of one content that no piece begins or ends within, so that each is held whole or not at
all.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from kvcontrol.scheduler_ir.nodes import Device
from kvcontrol.scheduler_ir.request import IRRequest
from kvcontrol.scheduler_ir.spans import KvSpan

_Segment = tuple[bytes | str, int]


_NOTHING: Counter[_Segment] = Counter()


class Footprint:
    """``spans`` are all that will ever be added. O(segments of a piece) a call."""

    def __init__(self, requests: Iterable[IRRequest], spans: Iterable[KvSpan]) -> None:
        self._requests = {each.request_id: each for each in requests}
        self._held: dict[Device, Counter[_Segment]] = {}
        self._tokens: dict[Device, int] = {}
        cuts: dict[bytes | str, set[int]] = {}
        for span in spans:
            for key, start, end in self._contents(span):
                cuts.setdefault(key, set()).update((start, end))
        self._cuts = {key: sorted(each) for key, each in cuts.items()}

    def held(self, device: Device) -> int:
        """How many tokens a device holds."""
        return self._tokens.get(device, 0)

    def added(self, span: KvSpan) -> int:
        """How many more its device would hold with a piece."""
        counts = self._held.get(span.device, _NOTHING)
        return sum(tokens for segment, tokens in self._segments(span) if not counts.get(segment))

    def add(self, span: KvSpan) -> None:
        """Its device holds a piece from now on, besides any other of the same content."""
        self._tokens[span.device] = self.held(span.device) + self.added(span)
        counts = self._held.setdefault(span.device, Counter())
        for segment, _ in self._segments(span):
            counts[segment] += 1

    def drop(self, span: KvSpan) -> None:
        """Its device holds a piece no more, that it held."""
        counts = self._held[span.device]
        for segment, tokens in self._segments(span):
            counts[segment] -= 1
            if not counts[segment]:
                del counts[segment]
                self._tokens[span.device] -= tokens

    def _segments(self, span: KvSpan) -> Iterable[tuple[_Segment, int]]:
        for key, start, end in self._contents(span):
            cuts = self._cuts[key]
            first, last = bisect_left(cuts, start), bisect_left(cuts, end)
            for place in range(first, last):
                yield (key, cuts[place]), cuts[place + 1] - cuts[place]

    def _contents(self, span: KvSpan) -> Iterable[tuple[bytes | str, int, int]]:
        """The stretches of a piece by what they were computed from."""
        start = span.start
        for prefix in self._requests[span.request].shared:
            if start < min(prefix.end, span.end):
                yield prefix.key, start, min(prefix.end, span.end)
                start = min(prefix.end, span.end)
        if start < span.end:
            yield span.request, start, span.end
