"""Tokens that change while the daemon runs: by SIGHUP, and by the file alone."""

import json
import os
import pty
import signal
import sys
from contextlib import contextmanager

import pytest
from served import Server, cluster, heard, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from moorage.testing.daemon_process import daemon

pytestmark = pytest.mark.heavy  # Daemons.

FIRST = '[tokens]\nann = ["old", "kept"]\nbob = "open"\n'
WITHOUT_OLD = '[tokens]\nann = ["kept", "fresh"]\nbob = "open"\n'


@contextmanager
def served(tmp_path, text=FIRST):
    file = tmp_path / "moored.toml"
    file.write_text(text)
    options = ("--config", str(file))
    info = {"MOORAGE_LOG_LEVEL": "info"}
    with daemon(tmp_path / "data", options=options, environment=info) as running:
        yield file, Server(running)


def session(server, token):
    headers = {"Authorization": f"Bearer {token}"}
    return connect(server.running.ws, additional_headers=headers, compression=None)


def leases(socket):
    socket.send(json.dumps({"op": "leases"}))
    return heard(socket)["success"]


def lines(server, event):
    read = map(json.loads, server.log().splitlines())
    return [line for line in read if line.get("event") == event]


@pytest.mark.parametrize("asked", [True, False])
def test_sessions_of_a_removed_token_end_and_no_others(tmp_path, asked):
    with (
        served(tmp_path) as (file, server),
        session(server, "old") as old,
        session(server, "kept") as kept,
        session(server, "open") as bob,
    ):
        server.http.headers["Authorization"] = "Bearer old"
        server.register(cluster("east"))
        file.write_text(WITHOUT_OLD)
        if asked:
            os.kill(server.pid, signal.SIGHUP)
        with pytest.raises(ConnectionClosed) as closed:
            old.recv(30)
        assert closed.value.rcvd.code == 4401
        assert server.http.get("/clusters/east").status_code == 401
        with pytest.raises(InvalidStatus, match="401"), session(server, "old"):
            pass
        assert leases(kept)
        assert leases(bob)
        with session(server, "fresh") as fresh:
            assert leases(fresh)
        until(lambda: lines(server, "tokens"))
        (said,) = lines(server, "tokens")
        assert (said["known"], said["added"], said["removed"]) == (3, 1, 1)
        text = server.log()
        assert not any(token in text for token in ("kept", "fresh"))
        server.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with served(tmp_path_factory.mktemp("shared")) as (file, server):
        yield file, server
        server.close()


def known(server, token):
    headers = {"Authorization": f"Bearer {token}"}
    return server.http.get("/policy", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("text", "setting", "said"),
    [
        ('[tokens]\nann = "two words"\n', "tokens", "each token for one tenant"),
        ("[tokens\n", "config", "expected a TOML file"),
        ('candidates_max = "x"\n' + FIRST, "candidates_max", "expected a whole number"),
        ("", "tokens", "restart to turn them on or off"),
        (None, "config", "cannot be read"),
    ],
)
def test_a_broken_file_leaves_the_tokens_as_they_are_and_is_named(shared, text, setting, said):
    file, server = shared
    file.write_text(FIRST)
    until(lambda: known(server, "old"))
    before = len(lines(server, "settings"))
    with session(server, "old") as old:
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: lines(server, "settings")[before:])
        (line,) = lines(server, "settings")[before:]
        assert (line["level"], line["setting"]) == ("error", setting)
        assert said in line["finding"]
        assert "two words" not in line["finding"]
        assert leases(old)
        file.write_text(WITHOUT_OLD)  # Mended: no request is needed.
        with pytest.raises(ConnectionClosed):
            old.recv(30)


def test_other_settings_are_named_and_wait_for_a_restart(tmp_path):
    with served(tmp_path) as (file, server):
        file.write_text('candidates_max = 7\nray_cluster = "rays"\n' + WITHOUT_OLD)
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: lines(server, "tokens"))
        (line,) = lines(server, "settings")
        assert line["changed"] == ["candidates_max", "ray_cluster"]
        server.close()


def test_a_daemon_whose_terminal_is_closed_ends(tmp_path):
    """As all programs do: SIGHUP says that too, and Ctrl-C could not end it any more."""
    serve = [sys.executable, "-m", "moorage", "serve", "--port", "0", "--http-port", "0"]
    command = [*serve, "--data", str(tmp_path)]
    pid, here = pty.fork()
    if pid == 0:
        os.execv(command[0], command)  # noqa: S606  # Our own program.
    said = b""
    while b'"ready"' not in said:
        said += os.read(here, 4096)
    os.close(here)
    assert os.waitpid(pid, 0)[1] == 0
