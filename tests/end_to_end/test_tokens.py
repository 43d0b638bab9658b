"""Tokens of leases: told to the client that asked, kept nowhere."""

import stat
from pathlib import Path

import pytest
from served import ask_message, cluster, serving

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon

pytestmark = pytest.mark.heavy

KEPT = {"gpus": 1}
TERMS = {"ttl_seconds": 300, "idempotency_key": "one and the same"}
OFTEN = {"MOORAGE_CHECKPOINT_EVERY_FACTS": "100"}


def has(folder: Path, text: str) -> list[Path]:
    """Return the files that hold a text anywhere."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_no_file_holds_a_token_and_a_retry_is_told_it_again(tmp_path):
    asked = ask_message(resources=KEPT, lease=TERMS)
    with serving(tmp_path, environment=OFTEN) as server:
        server.fill(cluster("east"))
        lease = server.say(asked)[0]["lease"]
        token = lease["token"]
        assert server.say(asked)[0]["lease"]["token"] == token
        short = ask_message(resources=KEPT, lease={"ttl_seconds": 300})
        for _ in range(60):  # Makes it write a checkpoint.
            other = server.ask(**short)["lease"]
            server.release(other)
        waiting = ask_message(resources={"gpus": 99}, lease={"ttl_seconds": 9, "wait_seconds": 0})
        server.say(waiting)
        assert token not in str(server.say({"op": "leases"}, {"op": "why", "lease": lease["id"]}))
        assert has(tmp_path, lease["id"])
        assert has(tmp_path, token) == []
    assert has(tmp_path, token) == []
    with serving(tmp_path) as server:
        assert server.say(asked)[0]["lease"]["token"] == token
        release = {"op": "release", "lease": lease["id"]}
        wrong, right = server.say({**release, "token": "stolen"}, {**release, "token": token})
        assert wrong["error"]["code"] == "wrong_token"
        assert right["success"]


def test_tokens_outlive_the_secret_that_they_were_made_with(tmp_path):
    asked = ask_message(resources=KEPT, lease=TERMS)
    secret = tmp_path / "lease_secret"
    with serving(tmp_path) as server:
        server.fill(cluster("east"))
        lease = server.say(asked)[0]["lease"]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    secret.write_bytes(b"cut off")
    with pytest.raises(CommandError, match=r"lease_secret is damaged: it has 7 bytes"):
        daemon(tmp_path).__enter__()
    secret.unlink()
    with serving(tmp_path) as server:
        again = server.say(asked)[0]["lease"]
        assert again["id"] == lease["id"]
        assert "token" not in again
        assert server.say({"op": "renew", "lease": lease["id"], "token": lease["token"]})[0][
            "success"
        ]


def test_local_is_off_where_there_are_tokens():
    with serving(environment={"MOORAGE_TOKENS": "ann:sesame"}, bearer="sesame") as server:
        server.fill(cluster("east"))
        started = {"backend": "local", "spec": {"command": ["true"]}}
        reply = server.ask(resources=KEPT, lease={"ttl_seconds": 60}, provision=started)
        assert reply["error"]["field"] == "provision.backend"
        assert "`backends`" in reply["message"]
