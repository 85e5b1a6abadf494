"""F09: where a webhook may not go. The same words at the front door, and address by address at the wall."""

from __future__ import annotations

import pytest

from accounting.events.egress import STORE_PORTS, Egress, networks
from accounting.values.errors import InvalidError

PUBLIC = Egress()
OWN = Egress(networks("127.0.0.0/8, 10.1.0.0/16,fd00:1::/32"))

REFUSED_URLS = [
    # loopback, private, link-local, unspecified, shared, multicast, reserved
    "https://127.0.0.1/",
    "https://127.9.9.9/",
    "https://10.0.0.1/",
    "https://172.16.0.1/",
    "https://192.168.1.1/",
    "https://169.254.169.254/latest/meta-data/",
    "https://0.0.0.0/",
    "https://100.64.0.1/",
    "https://224.0.0.1/",
    "https://255.255.255.255/",
    "https://192.0.0.170/",
    "https://198.18.0.1/",
    "https://[::1]/",
    "https://[::]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[fd00:ec2::254]/",
    "https://[ff02::1]/",
    # IPv4 in IPv6 clothes: mapped, compatible, NAT64, 6to4
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[::127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[2002:7f00:1::]/",
    # decimal, octal, hex, short
    "https://2130706433/",
    "https://0177.0.0.1/",
    "https://0x7f.0.0.1/",
    "https://0x7f000001/",
    "https://127.1/",
    "https://017700000001/",
    "https://1.2.3.0x7f/",
    "https://127.0.0.1./",
    # names of here
    "https://localhost/",
    "https://localhost./",
    "https://LOCALHOST/",
    "https://a.localhost/",
    "https://redis/",
    "https://metadata.google.internal/",
    "https://printer.local/",
    "https://db.localdomain/",
    # schemes
    "http://example.com/",
    "file:///etc/passwd",
    "gopher://example.com/",
    "ftp://example.com/",
    "redis://example.com/",
    "//example.com/",
    "example.com",
    "javascript:alert(1)",
    "HTTPS:example.com",
    # user, fragment, and what two parsers read in two ways
    "https://user@example.com/",
    "https://user:secret@example.com/",
    "https://example.com@127.0.0.1/",
    "https://example.com#@127.0.0.1/",
    "https://example.com\\@127.0.0.1/",
    "https://exa mple.com/",
    "https://example.com/\r\nhost: x",
    "https://example.com\t/",
    "https://ⓔxample.com/",
    "https://１２７.0.0.1/",
    "https://%31%32%37.0.0.1/",
    "https://[::1",
    "https://",
    "https:///path",
    "https://exa_mple.com/",
    # ports
    "https://example.com:0/",
    "https://example.com:99999/",
    "https://example.com:x/",
    "https://example.com:22/",
    "https://example.com:25/",
    *(f"https://example.com:{port}/" for port in sorted(STORE_PORTS)),
    "https://example.com/" + "a" * 2048,
]


@pytest.mark.parametrize("url", REFUSED_URLS, ids=lambda url: ascii(url)[:60])
def test_a_place_that_is_not_spoken_to_is_refused_when_it_is_given(url: str) -> None:
    with pytest.raises(InvalidError) as refusal:
        PUBLIC.check(url)
    assert refusal.value.param == "url"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/",
        "https://hooks.example.com/a?b=c",
        "https://example.com:8443/",
        "https://example.com./",
        "https://1.1.1.1/",
        "https://[2606:4700::1111]/",
        "https://xn--bcher-kva.example/",
        "HTTPS://example.com/",
    ],
)
def test_public_places_are_welcome(url: str) -> None:
    PUBLIC.check(url)


def test_own_networks_open_what_they_hold_and_no_more() -> None:
    for url in ("http://127.0.0.1:4000/", "https://10.1.2.3/", "http://[fd00:1::5]/", "http://[::ffff:10.1.2.3]/"):
        OWN.check(url)
    for url in (
        "http://10.2.0.1/",
        "https://10.2.0.1/",
        "http://127.0.0.1:6379/",
        "http://1.1.1.1/",
        "http://localhost/",
    ):
        with pytest.raises(InvalidError):
            OWN.check(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "::1",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
        "2001:0:1::",
        "fe80::1",
        "fe80::1%2",
        "fd00::1",
        "0.0.0.0",
        "100.100.100.200",
        "3fff::1",
        "192.88.99.1",
        "239.1.1.1",
        "2001:db8::1",
    ],
)
def test_addresses_are_judged_by_what_they_are(address: str) -> None:
    assert not PUBLIC.permits(address, 443)


def test_without_encryption_only_into_own_networks() -> None:
    assert PUBLIC.permits("1.1.1.1", 443)
    assert not PUBLIC.permits("1.1.1.1", 80, encrypted=False)
    assert OWN.permits("10.1.0.1", 80, encrypted=False)
    assert not OWN.permits("10.1.0.1", 5432)


@pytest.mark.parametrize("text", ["10.0.0.0/33", "here", "10.0.0.1/8"])
def test_networks_that_are_none_stop_the_start(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        networks(text)
