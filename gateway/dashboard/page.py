"""The status page: what the gateway knows right now, as one HTML text without scripts or outside files."""

from collections.abc import Mapping
from html import escape

from gateway.registry import Instance, InstanceState, LoadTracker, Registry
from gateway.telemetry import Outcome
from kvcontrol.prefix_reuse import FleetIndex

_REFRESH_S = 2
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;"
    "color:#1c2330;background:#fafbfc}h1{font-size:1.3rem}h2{font-size:1rem;margin-top:2rem}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.4rem .8rem;border-bottom:1px solid #dde2e8}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.healthy{color:#12733a}.unhealthy{color:#b3261e}"
    ".starting{color:#8a6100}footer{margin-top:2rem;color:#667}"
    "@media(prefers-color-scheme:dark){body{background:#14181f;color:#dfe4ea}th,td{border-color:#2c3440}"
    ".healthy{color:#5fd38d}.unhealthy{color:#ff8a80}.starting{color:#f2c14e}}"
)


def status_page(
    registry: Registry, load: LoadTracker, index: FleetIndex, *, policy: str, outcomes: Mapping[Outcome, int]
) -> str:
    """Return the page as it is now."""
    instances = registry.all()
    usable = sum(each.state is InstanceState.HEALTHY for each in instances)
    rows = (
        "".join(_row(each, load, index) for each in instances)
        or "<tr><td colspan=8>no instance is configured</td></tr>"
    )
    counts = "".join(f"<tr><td>{outcome}</td><td class=n>{outcomes.get(outcome, 0)}</td></tr>" for outcome in Outcome)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=refresh content={_REFRESH_S}><meta name=viewport content="width=device-width">'
        f"<title>kvgate: {usable} of {len(instances)} usable</title><style>{_STYLE}</style></head><body>"
        f"<h1>kvgate</h1><p>{usable} of {len(instances)} instances usable; routing by <b>{escape(policy)}</b>.</p>"
        "<h2>Instances</h2><table><tr><th>instance<th>state<th>serves<th>cached blocks<th>in flight<th>running"
        f"<th>waiting<th>why</tr>{rows}</table>"
        f"<h2>Requests since start</h2><table>{counts}</table>"
        "<footer>Refreshes every 2 s. Numbers for machines: <a href=/metrics>/metrics</a></footer></body></html>"
    )


def _row(each: Instance, load: LoadTracker, index: FleetIndex) -> str:
    held = index.blocks_held(each.id)
    blocks = ", ".join(f"{tier} {count}" for tier, count in held.items()) or "0"
    stats = each.stats
    cells = (
        f"<td><b>{escape(each.id)}</b><br><small>{escape(each.url)}</small>",
        f"<td class={each.state}>{each.state}",
        f"<td>{escape(', '.join(model.id for model in each.models)) or '-'}",
        f"<td class=n>{blocks}",
        f"<td class=n>{load.of(each.id).in_flight}",
        f"<td class=n>{'-' if stats is None else stats.load.running}",
        f"<td class=n>{'-' if stats is None else stats.load.waiting}",
        f"<td><small>{escape(each.reason)}</small>",
    )
    return "<tr>" + "".join(cells) + "</tr>"


__all__ = ["status_page"]
