"""Grafana's twins of the alert rules, and who is told: files that Grafana provisions itself with.

A rule's condition is that its expression finds anything at all, as it is with Prometheus. In annotations ``$value`` is
Prometheus' word; Grafana's is the value of the query. Grafana expands variables of the environment in the contact
point, not in annotations.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

import yaml

from dashboards.rules import Rule, load_rules

FOLDER: Final = "kvgate"
DATA_SOURCE: Final = "kvgate-prometheus"
WEBHOOK: Final = "$KVGATE_ALERT_WEBHOOK_URL"
_EVERY: Final = "30s"
_LOOK_BACK_S: Final = 600
_QUERY, _CONDITION = "A", "B"
_RECEIVER: Final = "kvgate"
_HEAD: Final = (
    "# Written by `make docs` from dashboards/prometheus/rules.yml and dashboards/alerting.py: change it there.\n"
)
_REPEATED: Final = {"page": "1h", "ticket": "12h", "info": "3d"}
"""How often somebody is told again of what goes on."""


def rules() -> str:
    """Return the file with the rules."""
    alerts = [each for each in load_rules() if each.alert]
    groups = [
        {
            "orgId": 1,
            "name": name,
            "folder": FOLDER,
            "interval": _EVERY,
            "rules": [_rule(each) for each in members],
        }
        for name, members in groupby(alerts, key=lambda each: each.group)
    ]
    return _written({"apiVersion": 1, "groups": groups})


def notifications() -> str:
    """Return the file with the contact point and the policy that sends everything to it."""
    receiver = {"uid": "kvgate-webhook", "type": "webhook", "settings": {"url": WEBHOOK, "httpMethod": "POST"}}
    policy = {
        "orgId": 1,
        "receiver": _RECEIVER,
        "group_by": ["alertname"],
        "group_wait": "30s",
        "group_interval": "5m",
        "repeat_interval": _REPEATED["ticket"],
        "routes": [
            {"receiver": _RECEIVER, "object_matchers": [["severity", "=", severity]], "repeat_interval": again}
            | ({"group_wait": "10s"} if severity == "page" else {})
            for severity, again in _REPEATED.items()
        ],
    }
    contact = {"orgId": 1, "name": _RECEIVER, "receivers": [receiver]}
    return _written({"apiVersion": 1, "contactPoints": [contact], "policies": [policy]})


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "uid": re.sub(r"(?<!^)(?=[A-Z])", "-", rule.name).lower(),
        "title": rule.name,
        "condition": _CONDITION,
        "data": [
            {
                "refId": _QUERY,
                "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
                "datasourceUid": DATA_SOURCE,
                "model": {"refId": _QUERY, "expr": rule.expr, "instant": True, "range": False},
            },
            {
                "refId": _CONDITION,
                "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
                "datasourceUid": "__expr__",
                "model": {
                    "refId": _CONDITION,
                    "type": "math",
                    "datasource": {"type": "__expr__", "uid": "__expr__"},
                    "expression": f"is_number(${_QUERY}) || is_inf(${_QUERY})",
                },
            },
        ],
        "for": rule.lasting,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": dict(rule.labels),
        "annotations": {
            name: re.sub(r"\$value\b", f"$values.{_QUERY}.Value", text) for name, text in rule.annotations.items()
        },
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _written(content: Mapping[str, Any]) -> str:
    return _HEAD + yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, width=1000)
