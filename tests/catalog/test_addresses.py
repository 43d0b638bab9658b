"""Tests of the rule which IP addresses are public."""

import pytest

from moorage.catalog.documents.sources import is_public

PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 100.63.255.255 100.128.0.1 172.32.0.1 223.255.255.255
2606:4700::1111 2a00:1450:4001::1 2620:fe::fe ::ffff:8.8.8.8 64:ff9b::8.8.8.8
"""
NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.0.0.1 127.0.0.1 127.255.255.254 172.16.0.1 172.31.255.255 192.168.1.1
169.254.169.254 169.254.170.2 100.64.0.1 100.100.100.200 168.63.129.16 192.0.0.192 192.0.0.9
192.0.2.1 192.88.99.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1
255.255.255.255
:: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:0:127.0.0.1
64:ff9b::127.0.0.1 64:ff9b::169.254.169.254 64:ff9b:1::8.8.8.8 100::1
fe80::1 fe80::a9fe:a9fe%eth0 fec0::1 fc00::1 fd00:ec2::254 fd20:ce::254 ff02::1 ff0e::1
2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:db8::1 2002:7f00:1:: 2002:808:808:: 3fff::1
"""


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_private_and_reserved_addresses_are_not_public(address):
    assert not is_public(address)
