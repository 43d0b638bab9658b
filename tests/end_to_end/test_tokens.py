"""The token of a lease is sent to the client of the request, and stored in no file."""

import stat
from pathlib import Path

import pytest
from served import ask_message, cluster, serving

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon

pytestmark = pytest.mark.heavy

ONE = {"gpus": 1}
REQUEST = ask_message(resources=ONE, lease={"ttl_seconds": 300, "idempotency_key": "key"})
OFTEN = {"MOORAGE_CHECKPOINT_EVERY_FACTS": "100"}


def has(folder: Path, text: str) -> list[Path]:
    """Return the files that hold a text anywhere."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_no_file_holds_a_lease_token_and_a_retry_returns_it_again(tmp_path):
    secret = tmp_path / "lease_secret"
    with serving(tmp_path, environment=OFTEN) as server:
        server.fill(cluster("east"))
        lease = server.say(REQUEST)[0]["lease"]
        token = lease["token"]
        assert server.say(REQUEST)[0]["lease"]["token"] == token
        for _ in range(60):  # Enough facts for a checkpoint.
            server.release(server.ask(resources=ONE, lease={"ttl_seconds": 300})["lease"])
        assert token not in str(server.say({"op": "leases"}, {"op": "why", "lease": lease["id"]}))
        assert has(tmp_path, lease["id"])
        assert has(tmp_path, token) == []
    assert has(tmp_path, token) == []
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with serving(tmp_path) as server:
        assert server.say(REQUEST)[0]["lease"]["token"] == token
        assert server.release(lease | {"token": "stolen"})["error"]["code"] == "wrong_token"
    secret.write_bytes(b"cut off")
    with pytest.raises(CommandError, match=r"lease_secret is damaged: it has 7 bytes"):
        daemon(tmp_path).__enter__()
    secret.unlink()
    with serving(tmp_path) as server:
        again = server.say(REQUEST)[0]["lease"]
        assert again["id"] == lease["id"]
        assert "token" not in again
        assert server.release(lease)["success"], "tokens outlive the secret of their signature"
