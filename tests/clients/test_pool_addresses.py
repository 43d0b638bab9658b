"""Tests of the addresses of pools: their syntax, and which of several a client uses."""

import os
from pathlib import Path

import pytest

from moorage_client.pool.addresses import Tcp, Uds, address_here, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("uds:/run/pool.sock", Uds(Path("/run/pool.sock"))),
        ("tcp:127.0.0.1:8000", Tcp("127.0.0.1", 8000)),
        ("tcp:localhost:0", Tcp("localhost", 0)),
        ("tcp:[::1]:8000", Tcp("::1", 8000)),
    ],
)
def test_valid_addresses_are_accepted(text, address):
    assert parse_address(text) == address
    assert parse_address("uds:pool.sock") == Uds(Path.cwd() / "pool.sock")


@pytest.mark.parametrize(
    "text",
    [
        "", "uds:", "tcp:", "tcp:8000", "tcp:127.0.0.1:", "tcp:127.0.0.1:x", "tcp:127.0.0.1:65536",
        "http://127.0.0.1:8000", "tcp:10.0.0.1:8000", "tcp:0.0.0.0:8000", "tcp:example.org:80",
    ],
)  # fmt: skip
def test_invalid_addresses_are_refused(text):
    with pytest.raises(ValueError, match="expected"):
        parse_address(text)


def test_the_variable_of_moorage_precedes_the_documented_variable():
    documented = {"CANARY_RESOURCE_POOL_ADDR": "tcp:127.0.0.1:1"}
    assert address_here(documented) == Tcp("127.0.0.1", 1)
    assert address_here(documented | {"MOORAGE_POOL_ADDRESS": "uds:/a"}) == Uds(Path("/a"))
    assert address_here({"XDG_RUNTIME_DIR": "/r"}) == Uds(Path("/r/moorage/pool.sock"))
    assert str(os.getuid()) in str(address_here({}))
    with pytest.raises(ValueError, match="MOORAGE_POOL_ADDRESS"):
        address_here({"MOORAGE_POOL_ADDRESS": "nowhere"})
