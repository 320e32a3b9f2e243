from typing import Any

import msgspec
import pytest

from gateway.registry.addresses import AddressRules
from gateway.registry.report import ReportError, read_report

HERE, ELSEWHERE = "http://127.0.0.1:9001", "http://10.0.0.7:9001"


def report(**changes: dict[str, Any]) -> bytes:
    said: dict[str, Any] = {
        "epoch": "e",
        "engine": "x",
        "engine_version": "1",
        "device": "cpu",
        "started_at_s": 0,
        "context_length_tokens": 1,
        "identity": {"model": "m", "revision": "r", "kv_dtype": "f", "block_size_tokens": 1},
        "events": {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://[::1]:65535", "seq": -1},
        "tiers": {"HBM": {"capacity_blocks": 4, "used_blocks": 1, "cached_blocks": 1, "block_bytes": 8}},
        "load": {"running": 0, "waiting": 0, "max_batch_size": 1},
        "prefix_cache": {"query_tokens": 0, "hit_tokens": 0},
    }
    for section, fields in changes.items():
        said[section] = said.get(section, {}) | fields
    return msgspec.json.encode(said)


def test_a_sane_report_is_taken() -> None:
    assert read_report(report(), url=ELSEWHERE, rules=None).events.seq == -1
    assert read_report(report(events={"endpoint": "ipc:///run/kv/events"}), url=HERE, rules=None).events.seq == -1
    for endpoint in ("", "[::1]:5559"):
        assert read_report(report(pd={"endpoint": endpoint}), url=HERE, rules=None).pd is not None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"load": {"running": -1}}, "load.running"),
        ({"load": {"waiting": -1}}, "load.waiting"),
        ({"load": {"max_batch_size": -1}}, "load.max_batch_size"),
        ({"tiers": {"HBM": {"capacity_blocks": -4, "used_blocks": 0, "cached_blocks": 0, "block_bytes": 8}}}, "tiers"),
        ({"prefix_cache": {"hit_tokens": -1}}, "prefix_cache.hit_tokens"),
        ({"events": {"seq": -2}}, "events.seq"),
        ({"events": {"seq": 2**62}}, "events.seq"),
        ({"load": {"running": 2**60}}, "load.running"),
        ({"identity": {"block_size_tokens": 2**20}}, "identity.block_size_tokens"),
        ({"events": {"dropped": -1}}, "events.dropped"),
        ({"identity": {"block_size_tokens": 0}}, "identity"),
        ({"events": {"endpoint": "http://127.0.0.1:1"}}, "events.endpoint"),
        ({"events": {"endpoint": "tcp://127.0.0.1"}}, "events.endpoint"),
        ({"events": {"endpoint": "tcp://127.0.0.1:0"}}, "events.endpoint"),
        ({"events": {"endpoint": "tcp://127.0.0.1:70000"}}, "events.endpoint"),
        ({"events": {"replay_endpoint": ""}}, "events.replay_endpoint"),
        ({"events": {"replay_endpoint": "ipc://kv/events"}}, "events.replay_endpoint"),
        ({"events": {"replay_endpoint": "ipc:///run/kv/../../etc"}}, "events.replay_endpoint"),
        ({"pd": {"endpoint": "10.0.0.7:99999"}}, "pd.endpoint"),
        ({"pd": {"endpoint": "10.0.0.7"}}, "pd.endpoint"),
        ({"pd": {"endpoint": "10.0.0.7\r\nx-kvgate-salt: s:80"}}, "pd.endpoint"),
    ],
)
def test_one_that_can_not_be_true_is_refused_by_name(changes: dict[str, dict[str, Any]], name: str) -> None:
    with pytest.raises(ReportError, match=name):
        read_report(report(**changes), url=HERE, rules=None)


def test_an_instance_elsewhere_names_no_socket_file_of_this_machine() -> None:
    with pytest.raises(ReportError, match="another machine"):
        read_report(report(events={"endpoint": "ipc:///run/kv/events"}), url=ELSEWHERE, rules=None)


def test_what_is_no_report_is_another_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_report(b"<html>", url=HERE, rules=None)


def test_one_that_registered_itself_names_no_host_where_it_could_not_be() -> None:
    own = report(events={"endpoint": "tcp://10.0.0.7:1", "replay_endpoint": "tcp://*:2"})
    assert read_report(own, url=ELSEWHERE, rules=AddressRules()).events.endpoint == "tcp://10.0.0.7:1"
    for endpoint in ("tcp://8.8.8.8:1", "tcp://169.254.169.254:80", "tcp://localhost:1"):
        with pytest.raises(ReportError, match="another host"):
            read_report(report(events={"endpoint": endpoint}), url=ELSEWHERE, rules=AddressRules())
