"""What each port must make of `X-Forwarded-For`, from a client at 127.0.0.1."""

import pytest

forwarded_clients = pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        (["127.0.0.0/8"], "198.51.100.1, 192.0.2.7", "192.0.2.7"),
        (["127.0.0.0/8"], "unknown", "127.0.0.1"),
        (["10.0.0.0/8"], "192.0.2.7", "127.0.0.1"),
        ([], "192.0.2.7", "127.0.0.1"),
    ],
)
"""Trusted proxies, the header, and the client's address."""
