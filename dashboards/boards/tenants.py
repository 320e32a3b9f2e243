"""Tenants: requests, quotas, and KV in the tiers."""

from typing import Final

from dashboards.panel import Board, Proof, Query, Row, Shown, lines, query, quiet, rate, stacked

_QUOTA: Final = "no tenant has a quota"
_SHED: Final = 'outcome="shed"'
_CACHED: Final = 'kind="cached"'
_PROMPT: Final = 'kind="prompt"'
_TIERS: Final = "no tiers below HBM"


def _named(series: str, *, nameless: str = "") -> tuple[Query, Query]:
    """An engine's metrics by tenant name, or by digest where no gateway knows the name; ``nameless`` says why behind
    a gateway none is without a name.
    """
    of_engine = f'sum by (tier, kv_tenant) (label_replace({series}, "kv_tenant", "$1", "tenant", "(.*)"))'
    names = "max by (kv_tenant, tenant) (kvgate_tenant_info)"
    unnamed = f"{of_engine} unless on (kv_tenant) {names}", "{{kv_tenant}} {{tier}}"
    return (
        query(f"{of_engine} * on (kv_tenant) group_left (tenant) {names}", "{{tenant}} {{tier}}"),
        quiet(nameless, Proof.NONE, *unnamed) if nameless else query(*unnamed),
    )


_TRAFFIC: Final = Row(
    title="Requests",
    panels=(
        stacked(
            "Requests",
            "`other` are tenants without a name or beyond the first hundred.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_tenant_requests_total", "tenant"), "{{tenant}}"),
        ),
        lines(
            "Share of shed requests",
            "429 by quota or saturation.",
            Shown.SHARE,
            query(
                f"({rate('kvgate_tenant_requests_total', 'tenant', _SHED)} or {rate('kvgate_tenant_requests_total', 'tenant')} * 0) / {rate('kvgate_tenant_requests_total', 'tenant')}",
                "{{tenant}}",
            ),
        ),
        lines(
            "Requests by outcome",
            "Requests of each tenant.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_tenant_requests_total", "tenant, outcome"), "{{tenant}} {{outcome}}"),
        ),
        stacked(
            "Tokens",
            "Prompt and completion tokens.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_tenant_tokens_total", "tenant", 'kind!="cached"'), "{{tenant}}"),
        ),
        lines(
            "Prompt tokens from cache",
            "Share of the tenant's prompt tokens that were cached.",
            Shown.SHARE,
            query(
                f"{rate('kvgate_tenant_tokens_total', 'tenant', _CACHED)} / {rate('kvgate_tenant_tokens_total', 'tenant', _PROMPT)}",
                "{{tenant}}",
            ),
        ),
        lines(
            "Refused before sending, by reason",
            "Refused requests of all tenants.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_shed_requests_total", "reason"), "{{reason}}"),
            empty="no request was refused",
        ),
    ),
)

_QUOTAS: Final = Row(
    title="Quotas",
    panels=(
        lines(
            "Quotas",
            "Configured quotas.",
            Shown.COUNT,
            query("max by (tenant, quota) (kvgate_tenant_quota)", "{{tenant}} {{quota}}"),
            empty=_QUOTA,
        ),
        lines(
            "Use of the request quota",
            "1 is all of it.",
            Shown.SHARE,
            query(
                'sum by (tenant) (rate(kvgate_tenant_requests_total{outcome!="shed"}[$__rate_interval])) * 60 / max by (tenant) (kvgate_tenant_quota{quota="requests_per_min"})',
                "{{tenant}}",
            ),
            empty=_QUOTA,
        ),
        lines(
            "Use of the token quota",
            "Prompt and completion tokens; 1 is the whole quota.",
            Shown.SHARE,
            query(
                'sum by (tenant) (rate(kvgate_tenant_tokens_total{kind!="cached"}[$__rate_interval])) * 60 / max by (tenant) (kvgate_tenant_quota{quota="tokens_per_min"})',
                "{{tenant}}",
            ),
            empty=_QUOTA,
        ),
    ),
)

_KV: Final = Row(
    title="KV in the tiers below HBM",
    panels=(
        stacked("Bytes", "Over all instances.", Shown.BYTES, *_named("kvgate_engine_tenant_used_bytes"), empty=_TIERS),
        lines(
            "Guaranteed",
            "Bytes below which other tenants' blocks never evict a tenant.",
            Shown.BYTES,
            *_named("kvgate_engine_tenant_guaranteed_bytes"),
            empty=_TIERS,
        ),
        lines(
            "Burst",
            "Most bytes that a tenant may occupy; beyond them the tenant's own blocks are evicted.",
            Shown.BYTES,
            *_named(
                "kvgate_engine_tenant_burst_bytes",
                nameless="a gateway takes back the burst limits of tenants that its store does not have",
            ),
            empty="no tenant has a burst limit",
        ),
        lines(
            "Quota violations",
            "Blocks evicted or refused because of a tenant's burst limit.",
            Shown.BLOCKS_PER_SECOND,
            *_named("rate(kvgate_engine_tenant_over_burst_blocks_total[$__rate_interval])"),
            empty=_TIERS,
        ),
        lines(
            "Hits",
            "Blocks found by loads.",
            Shown.BLOCKS_PER_SECOND,
            *_named("rate(kvgate_engine_tenant_hit_blocks_total[$__rate_interval])"),
            empty=_TIERS,
        ),
    ),
)

BOARD: Final = Board(
    uid="kvgate-tenants",
    title="kvgate: tenants and quotas",
    about="Requests, quotas and KV of each tenant.",
    rows=(_TRAFFIC, _QUOTAS, _KV),
)
