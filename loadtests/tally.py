"""Figures of answers as rows of locust's own statistics: its UI, CSV and report show them, its workers send them.

A row's "response times" are the figure's values: milliseconds for ``TTFT ms`` and ``ITL ms``, tokens for the others.
They are left out of the row ``Aggregated``, which stays what it is: whole requests.
"""

from locust.stats import RequestStats, StatsEntry

from loadtests.exchange import Reply
from loadtests.verdict import Figures

TTFT = "TTFT ms"
ITL = "ITL ms"
CACHED = "cached tokens"
PROMPT = "prompt tokens"
_SHED = "RequestShed"
"""In an error's repr: an exception here, the text of one where a worker sent it."""


def count(stats: RequestStats, name: str, reply: Reply) -> None:
    """Count a whole answer."""
    stats.get(name, TTFT).log(round(reply.ttft_ms), 0)
    pauses = stats.get(name, ITL)
    for gap_ms in reply.gaps_ms:
        pauses.log(round(gap_ms), 0)
    stats.get(name, PROMPT).log(reply.prompt_tokens, 0)
    stats.get(name, CACHED).log(reply.cached_tokens, 0)


def figures(stats: RequestStats) -> Figures:
    """Return what all of it comes to, over all users; locust rounds times above 100 ms to two digits."""
    requests = stats.total.num_requests
    shed = sum(each.occurrences for each in stats.errors.values() if _SHED in repr(each.error))
    ttft, itl, cached, prompt = (_over_all(stats, figure) for figure in (TTFT, ITL, CACHED, PROMPT))
    return Figures(
        requests=requests,
        failed_ratio=(stats.total.num_failures - shed) / requests if requests else 0.0,
        shed_ratio=shed / requests if requests else 0.0,
        ttft_p50_ms=_percentile(ttft, 0.5),
        ttft_p95_ms=_percentile(ttft, 0.95),
        itl_p95_ms=_percentile(itl, 0.95),
        e2e_p95_ms=_percentile(stats.total, 0.95),
        cached_ratio=cached.total_response_time / prompt.total_response_time if prompt.total_response_time else None,
    )


def _over_all(stats: RequestStats, figure: str) -> StatsEntry:
    whole = StatsEntry(stats, "all", figure)
    for (_, method), entry in list(stats.entries.items()):
        if method == figure:
            whole.extend(entry)
    return whole


def _percentile(entry: StatsEntry, share: float) -> float | None:
    return float(entry.get_response_time_percentile(share)) if entry.num_requests else None
