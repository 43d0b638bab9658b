"""Tests of the bounds of connections per address."""

from moorage.protocol.peers import Peers, most_of_one


def test_the_oldest_connection_of_all_and_of_each_address_is_known():
    peers: Peers[int] = Peers()
    for member, address in ((1, "10.0.0.1"), (2, "10.0.0.2"), (3, "10.0.0.1"), (1, "10.0.0.1")):
        peers.add(member, address)
    assert (len(peers), peers.count("10.0.0.1"), peers.count("10.0.0.3")) == (3, 2, 0)
    assert (peers.oldest(), peers.oldest("10.0.0.2"), peers.oldest("10.0.0.3")) == (1, 2, None)
    peers.remove(1)
    peers.remove(1)
    assert (peers.oldest(), peers.oldest("10.0.0.1")) == (2, 3)
    for member in (2, 3):
        peers.remove(member)
    assert (len(peers), peers.oldest()) == (0, None)


def test_a_network_of_ipv6_counts_as_one_address():
    peers: Peers[int] = Peers()
    for member, address in enumerate(("fd00::1", "fd00::ffff:2", "fe80::1%eth0", "10.0.0.1")):
        peers.add(member, address)
    assert peers.count("fd00::3") == 2
    assert peers.count("fe80::9") == 1
    assert peers.count("::ffff:10.0.0.1") == 1
    peers.add(9, "/run/some.socket")
    assert peers.count("/run/some.socket") == 1


def test_one_address_may_take_most_but_not_all_connections():
    assert [most_of_one(limit) for limit in (1, 2, 4, 100)] == [1, 2, 3, 75]
