import ipaddress
import socket

import pytest

from gateway.http.endpoint import endpoint_of, serves
from gateway.http.resolver import Address
from gateway.registry.addresses import AddressError, AddressRules
from gateway.settings.fleet import InstanceSettings
from gateway.upstream.resolver import GuardedResolver

RULES = AddressRules()


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://127.0.0.1:9001", "http://127.0.0.1:9001"),
        ("HTTP://10.0.0.7:9001/", "http://10.0.0.7:9001"),
        ("https://engine-0.llm.svc", "https://engine-0.llm.svc"),
        ("http://[fd00::1]:9001", "http://[fd00::1]:9001"),
        ("http://127.1:9001", "http://127.0.0.1:9001"),
        ("http://0x7f000001:9001", "http://127.0.0.1:9001"),
        ("http://[::ffff:127.0.0.1]:9001", "http://127.0.0.1:9001"),
        ("http://127.0.0.1.:9001", "http://127.0.0.1:9001"),
        ("http://Engine-0.LLM.svc:80", "http://engine-0.llm.svc"),
        ("https://10.0.0.7:443/", "https://10.0.0.7"),
        ("http://[FD00:0::1]:80", "http://[fd00::1]"),
    ],
)
def test_an_instance_inside_is_taken_as_an_origin(url: str, origin: str) -> None:
    assert RULES.origin(url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "gopher://127.0.0.1:70",
        "ftp://10.0.0.1",
        "http://8.8.8.8",
        "http://169.254.169.254",
        "http://[::ffff:169.254.169.254]:80",
        "http://[64:ff9b::a9fe:a9fe]",
        "http://[2002:a9fe:a9fe::]",
        "http://[fe80::1]",
        "http://[fd00:ec2::254]",
        "http://[fd20:ce::254]:80",
        "http://0.0.0.0:9001",
        "http://[::]:9001",
        "http://224.0.0.1",
        "http://user:password@10.0.0.1",
        "http://10.0.0.1@8.8.8.8",
        "http://10.0.0.1/admin",
        "http://10.0.0.1?x",
        "http://10.0.0.1#x",
        "http://10.0.0.1\\@8.8.8.8",
        "http://10.0.0.1:0",
        "http://10.0.0.1:99999",
        "http://10.0.0.1\r\nx: y",
        "http:// 10.0.0.1",
        "http://",
        "//10.0.0.1",
        "",
        "http://" + "a" * 600,
        "http://127.1.2.3.4:9001",
        "http://engine.256",
        "http://0x100000000",
    ],
)
def test_everything_else_is_refused(url: str) -> None:
    with pytest.raises(AddressError):
        RULES.origin(url)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "fd00:ec2::23",
        "64:ff9b:1::a9fe:a9fe",
        "64:ff9b::6464:64c8",
    ],
)
def test_where_clouds_keep_credentials_is_no_instance_whatever_networks_are_allowed(address: str) -> None:
    everywhere = AddressRules.of(["http"], ["0.0.0.0/0", "::/0"])
    with pytest.raises(AddressError, match="never an instance's"):
        everywhere.check(ipaddress.ip_address(address))
    everywhere.check(ipaddress.ip_address("100.100.100.201"))


@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0251.0376"])
async def test_odd_spellings_of_an_address_are_looked_up_and_then_refused(host: str) -> None:
    with pytest.raises(AddressError, match=r"169\.254\.169\.254|can't be looked up"):
        await RULES.vetted(f"http://{host}:80")


async def test_a_name_is_looked_up() -> None:
    assert await RULES.vetted("http://localhost:9001") == "http://localhost:9001"
    with pytest.raises(AddressError, match="outside the allowed networks"):
        await AddressRules.of(["http"], ["10.0.0.0/8"]).vetted("http://localhost:9001")
    with pytest.raises(AddressError, match="can't be looked up"):
        await RULES.vetted("http://no-such-host.invalid")


def test_schemes_and_networks_are_the_operators() -> None:
    rules = AddressRules.of(["https"], ["203.0.113.0/24"])
    assert rules.origin("https://203.0.113.9") == "https://203.0.113.9"
    with pytest.raises(AddressError, match="'http' is not allowed; allowed are https"):
        rules.origin("http://203.0.113.9")
    with pytest.raises(AddressError, match=r"203\.0\.113\.0/24"):
        rules.check(ipaddress.ip_address("10.0.0.1"))


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:9001",
        "HTTP://LOCALHOST.:9001/",
        "http://127.1:9001",
        "http://[::ffff:127.0.0.1]:9001",
        "https://user:password@2130706433:9001",
    ],
)
def test_all_spellings_of_an_address_are_one_place(url: str) -> None:
    assert endpoint_of(url) == endpoint_of("http://127.0.0.1:9001")
    for other in ("http://127.0.0.1:9002", "http://127.0.0.2:9001", "http://[::1]:9001", "http://127.0.0.1:9001/api"):
        assert endpoint_of(url) != endpoint_of(other)


def test_the_settings_name_an_instance_by_its_usual_address() -> None:
    assert InstanceSettings(id="a", url="http://user@127.1:9001/api/").url == "http://user@127.0.0.1:9001/api"
    assert InstanceSettings(id="a", url="http://engine:9001").url == "http://engine:9001"


def test_a_server_that_listens_everywhere_answers_on_loopback() -> None:
    own = endpoint_of("http://localhost:8000")
    assert serves("0.0.0.0", 8000, own)  # noqa: S104 - nothing is bound
    assert serves("::", 8000, endpoint_of("http://[::1]:8000"))
    assert serves("127.0.0.1", 8000, own)
    assert not serves("127.0.0.1", 8001, own)
    assert not serves("10.0.0.7", 8000, own)


class Rebinding:
    """A name server that changes its mind."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def resolve(self, host: str, port: int) -> list[Address]:
        del host
        return [Address(family=socket.AF_INET, sockaddr=(each, port)) for each in self.addresses]


async def test_a_name_that_points_elsewhere_by_now_is_not_connected_to() -> None:
    inside = GuardedResolver(RULES, trusted=lambda _: False, lookup=Rebinding("169.254.169.254", "10.0.0.1"))
    assert [each.host for each in await inside.resolve("engine", 80)] == ["10.0.0.1"]
    outside = GuardedResolver(RULES, trusted=lambda _: False, lookup=Rebinding("169.254.169.254"))
    with pytest.raises(OSError, match="never an instance's"):
        await outside.resolve("engine", 80)


async def test_a_host_that_the_settings_name_may_be_anywhere() -> None:
    resolver = GuardedResolver(RULES, trusted=lambda host: host == "api.example", lookup=Rebinding("203.0.113.1"))
    assert len(await resolver.resolve("api.example", 443)) == 1
    with pytest.raises(OSError, match="outside the allowed networks"):
        await resolver.resolve("other.example", 443)
