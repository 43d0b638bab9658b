"""Tests of tokens that change while the daemon runs, with and without SIGHUP."""

import json
import os
import pty
import signal
import sys

import pytest
from served import bearing, serving, tell, until
from websockets.exceptions import ConnectionClosed, InvalidStatus

pytestmark = pytest.mark.heavy  # Daemons.

FIRST = '[tokens]\nann = ["old", "stays"]\nbob = "open"\n'
WITHOUT_OLD = '[tokens]\nann = ["stays", "fresh"]\nbob = "open"\n'


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "moored.toml"
    file.write_text(FIRST)
    info = {"MOORAGE_LOG_LEVEL": "info"}
    data = file.with_name("data")
    with serving(data, options=("--config", str(file)), environment=info) as server:
        yield file, server


@pytest.fixture
def first(shared_server):
    """A server with the first tokens, and its file of tokens."""
    file, server = shared_server
    if not is_known(server, "old"):
        file.write_text(FIRST)
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: is_known(server, "old"))
    return file, server


def is_known(server, token):
    return server.http.get("/policy", headers=bearing(token)).status_code == 200


def answers(socket):
    return tell(socket, {"op": "leases"})["success"]


def lines(server, event):
    read = map(json.loads, server.log().splitlines())
    return [line for line in read if line.get("event") == event]


def changes(server):
    """Return the audit entries of changed tokens."""
    logged = (file.read_text().splitlines() for file in server.data.glob("audit/*.jsonl"))
    entries = [json.loads(line) for each in logged for line in each]
    return [entry for entry in entries if entry["what"] == "tokens.changed"]


@pytest.mark.parametrize("sends_sighup", [True, False])
def test_only_the_sessions_of_a_removed_token_end(first, sends_sighup):
    file, server = first
    before, changed = len(lines(server, "tokens_changed")), changes(server)
    with (
        server.socket(bearer="old") as old,
        server.socket(bearer="stays") as stays,
        server.socket(bearer="open") as bob,
    ):
        file.write_text(WITHOUT_OLD)
        if sends_sighup:
            os.kill(server.pid, signal.SIGHUP)
        with pytest.raises(ConnectionClosed) as closed:
            old.recv(30)
        assert closed.value.rcvd.code == 4401
        assert not is_known(server, "old")
        with pytest.raises(InvalidStatus, match="401"), server.socket(bearer="old"):
            pass
        assert answers(stays)
        assert answers(bob)
        with server.socket(bearer="fresh") as fresh:
            assert answers(fresh)
        until(lambda: lines(server, "tokens_changed")[before:])
        (line,) = lines(server, "tokens_changed")[before:]
        assert (line["known"], line["added"], line["removed"]) == (3, 1, 1)
        until(lambda: changes(server)[len(changed) :])
        entry = changes(server)[-1]
        assert entry["about"] == {"added_for": ["ann"], "removed_for": ["ann"]}
        text = server.log() + json.dumps(entry)
        assert not any(token in text for token in ("stays", "fresh"))


BROKEN = [
    ('[tokens]\nann = "two words"\n', "tokens", "each token for one tenant"),
    ("[tokens\n", "config", "expected a TOML file"),
    ('candidates_max = "x"\n' + FIRST, "candidates_max", "expected a whole number"),
    ("", "tokens", "restart to turn tokens on or off"),
    (None, "config", "cannot be read"),
]


def test_a_broken_settings_file_changes_no_token_and_the_log_names_the_fault(first):
    file, server = first
    with server.socket(bearer="old") as old:
        for text, setting, reason in BROKEN:
            before = len(lines(server, "settings_refused"))
            if text is None:
                file.unlink()
            else:
                file.write_text(text)
            os.kill(server.pid, signal.SIGHUP)
            until(lambda before=before: lines(server, "settings_refused")[before:])
            (line,) = lines(server, "settings_refused")[before:]
            assert (line["level"], line["setting"]) == ("error", setting)
            assert reason in line["finding"]
            assert "two words" not in line["finding"]
            assert answers(old)
        file.write_text(WITHOUT_OLD)  # Corrected: the server notices by itself.
        with pytest.raises(ConnectionClosed):
            old.recv(30)


def test_the_log_names_changed_settings_that_need_a_restart(first):
    file, server = first
    before = len(lines(server, "settings_need_restart"))
    file.write_text('candidates_max = 7\nray_cluster = "rays"\n' + WITHOUT_OLD)
    os.kill(server.pid, signal.SIGHUP)
    until(lambda: is_known(server, "fresh"))
    until(lambda: lines(server, "settings_need_restart")[before:])
    (line,) = lines(server, "settings_need_restart")[before:]
    assert line["changed"] == ["candidates_max", "ray_cluster"]


def test_a_daemon_ends_with_its_terminal(tmp_path):
    """Without its terminal no Ctrl-C can reach the daemon, so SIGHUP ends it."""
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


def test_a_change_while_the_server_is_stopped_has_an_entry_at_the_next_start(tmp_path):
    file = tmp_path / "moored.toml"
    for tokens in (FIRST, WITHOUT_OLD, WITHOUT_OLD):
        file.write_text(tokens)
        with serving(tmp_path / "data", options=("--config", str(file))) as server:
            assert (server.data / "tokens.seen").exists()
    (entry,) = changes(server)
    assert entry["about"] == {"added_for": ["ann"], "removed_for": ["ann"]}
