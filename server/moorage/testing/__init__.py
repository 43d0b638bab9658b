"""A real server for your own tests, with a fleet that exists on paper.

    with server() as running, BlockingClient(running.ws) as client:
        answer = client.ask("first_fit:1.0-stable", resources={"gpus": 1})

`moorage.testing.plugin` has this server as a fixture of pytest. `moorage.testing.fakes` has the
backend that starts nothing.

CommandError
└── ServerError    the server did not start, refused a document, or did not stop cleanly
"""

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import ServerError
from moorage.testing.local_server import Server, fake_cluster, server

__all__ = ["CommandError", "Server", "ServerError", "fake_cluster", "server"]
