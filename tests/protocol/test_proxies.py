"""Of `X-Forwarded-For`, only what trusted proxies added counts."""

import pytest

from moorage.protocol.proxies import Proxies, read_proxies, remote_text

PROXIES = read_proxies(["127.0.0.1", "10.0.0.0/8", "2001:db8:1::/48"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("127.0.0.1", ["192.0.2.7"], "192.0.2.7"),
        ("10.1.2.3", ["192.0.2.7"], "192.0.2.7"),
        ("::ffff:10.1.2.3", ["::ffff:192.0.2.7"], "192.0.2.7"),
        ("2001:db8:1::5", ["2001:DB8:2::0007"], "2001:db8:2::7"),
        ("fe80::1%eth0", ["192.0.2.7"], None),
        ("127.0.0.1", ["192.0.2.7:4711"], "192.0.2.7"),
        ("127.0.0.1", ["[2001:db8:2::7]"], "2001:db8:2::7"),
        ("127.0.0.1", ["[2001:db8:2::7]:4711"], "2001:db8:2::7"),
    ],
)
def test_a_trusted_proxy_names_the_client(peer, forwarded, client):
    assert PROXIES.client_of(peer, forwarded) == client


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["198.51.100.1, 192.0.2.7"], "192.0.2.7"),
        (["198.51.100.1", "192.0.2.7"], "192.0.2.7"),
        (["nonsense, 192.0.2.7, 10.0.0.9"], "192.0.2.7"),
        (["198.51.100.1,192.0.2.7 ,\t10.0.0.9,10.0.0.8,,"], "192.0.2.7"),
        (["10.0.0.9, 10.0.0.8"], "10.0.0.9"),
        (["192.0.2.7, 10.0.0.9:80, [2001:db8:1::5]"], "192.0.2.7"),
    ],
)
def test_the_last_address_that_is_not_a_trusted_proxy_is_the_client(forwarded, client):
    assert PROXIES.client_of("10.0.0.1", forwarded) == client


@pytest.mark.parametrize("peer", ["192.0.2.1", "127.0.0.2", "11.0.0.1", "2001:db8:2::1", "", "x"])
def test_the_header_of_an_untrusted_sender_is_ignored(peer):
    assert PROXIES.client_of(peer, ["198.51.100.1"]) is None
    assert Proxies().client_of(peer, ["198.51.100.1"]) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", " , ", "unknown", "_hidden", "localhost", "192.0.2", "192.0.2.7:", "192.0.2.7:http"),
        *("192.0.2.256", "192.0.2.7/32", "[192.0.2.7", "192.0.2.7]", "[::1]4711", "[::1]:", "::g"),
        *("1:2", "fe80::1%eth0", "[fe80::1%\x1b[31m]", "٣.0.0.1", "\x00", "0" * 60_000),
        "192.0.2.7, unknown, 10.0.0.9",
    ],
)
def test_behind_a_trusted_proxy_malformed_values_name_no_client(text):
    assert PROXIES.client_of("127.0.0.1", [text]) is None
    assert PROXIES.client_of("127.0.0.1", []) is None


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "proxy.example", "", "::1/129"])
def test_only_addresses_and_whole_networks_are_proxies(text):
    with pytest.raises(ValueError, match=r"host bits|does not appear"):
        read_proxies([text])


def test_the_text_of_a_remote_address_has_its_port_if_known():
    assert remote_text("192.0.2.7", 4711) == "192.0.2.7:4711"
    assert remote_text("::1", 4711) == "[::1]:4711"
    assert remote_text("::1", 0) == "::1"
