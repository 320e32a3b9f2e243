import pytest

from kvcontrol.core.pd import Fetch, Hold, Load, PdHeaderError, Save, new_ticket, parse_endpoint, parse_pd_header


def test_what_is_written_is_read() -> None:
    ticket = new_ticket()
    for part in (
        Hold(ticket=ticket),
        Fetch(ticket=ticket, host="10.0.0.7", port=9000),
        Save(),
        Load(host="10.0.0.7", port=9000),
    ):
        assert parse_pd_header(str(part)) == part


def test_a_bracketed_address_is_one_host() -> None:
    part = parse_pd_header(f"fetch;ticket={new_ticket()};from=[::1]:80")
    assert isinstance(part, Fetch)
    assert (part.host, part.port) == ("::1", 80)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "hold",
        "hold;ticket=abc",
        "hold;ticket=" + "G" * 32,
        "hold;ticket=" + "a" * 32 + " ",
        "fetch;ticket=" + "a" * 32,
        "fetch;ticket=" + "a" * 32 + ";from=host",
        "fetch;ticket=" + "a" * 32 + ";from=host:0",
        "fetch;ticket=" + "a" * 32 + ";from=host:70000",
        "fetch;ticket=" + "a" * 32 + ";from=a b:80",
        "save;ticket=" + "a" * 32,
        "load",
        "load;from=host:0",
        "load;from=host:70000",
        "load;from=host\r\nx:80",
        "load;from=h\u00f6st:80",
    ],
)
def test_anything_else_is_refused_without_repeating_it(value: str) -> None:
    with pytest.raises(PdHeaderError) as refused:
        parse_pd_header(value)
    assert "a" * 32 not in str(refused.value)


@pytest.mark.parametrize("endpoint", ["10.0.0.7:9000", "engine-0_a.kv:1", "[::1]:80", "fe80::1%eth0:65535"])
def test_every_endpoint_can_be_named_in_a_header(endpoint: str) -> None:
    place = parse_endpoint(endpoint)
    assert place is not None
    load = Load(host=place[0], port=place[1])
    assert parse_pd_header(str(load)) == load


@pytest.mark.parametrize(
    "endpoint",
    ["", "host", ":80", "host:0", "host:70000", "a b:80", "a;b:80", "a\r\nb: c:80", "h\u00f6st:80", "h" * 300 + ":80"],
)
def test_what_no_header_can_name_is_no_endpoint(endpoint: str) -> None:
    assert parse_endpoint(endpoint) is None


def test_tickets_are_not_alike() -> None:
    assert len({new_ticket() for _ in range(100)}) == 100
