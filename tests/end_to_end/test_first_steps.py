"""What a person meets in the first hour: wrong ports and names, keys of the wire in sentences."""

import pytest

pytestmark = pytest.mark.heavy  # A daemon.


def test_a_port_for_something_else_is_said_in_one_sentence(server):
    ws, http = server.running.ws, server.running.http
    done = server.moorage("leases", "--url", http.replace("http:", "ws:"))
    assert done.returncode == 4
    port = ws.rpartition(":")[2]
    assert done.stderr.endswith(f": this port speaks HTTP; connect the WebSocket to port {port}\n")
    other = server.moorage("policy", "list", "--http-url", ws.replace("ws:", "http:"))
    assert "HTTP has a port of its own" in other.stderr
