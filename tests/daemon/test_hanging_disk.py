"""A server whose disk hangs ends all the same, and its last line says why."""

import contextlib
import sys
from pathlib import Path

import httpx

from moorage.testing.daemon_process import child, serve_command, serve_variables
from tests.waiting import until

HANGING = """
import sys, threading
from moorage.__main__ import main as moored
from moorage.daemon import main
from moorage.daemon.observability.history import HistoryFile
from moorage.ledger import stored
from moorage.storage.sqlite.facts import SqliteFacts

def hang(*_):
    print("hangs", file=sys.stderr, flush=True)
    threading.Event().wait()

HistoryFile.read = hang
if sys.argv.pop(1) == "ledger":
    stored.COMMIT_SECONDS_MAX = 0.5
    SqliteFacts.commit = hang
main.STOP_SECONDS_MAX = 5.0
moored()
"""
CLUSTER = {"id": "c", "nodes": {"count": 0, "nodeData": []}}
END_SECONDS = 60


def command(data: Path, part: str) -> list[str]:
    """Return the command of a server where the history hangs, and perhaps the ledger."""
    words = serve_command(data)
    return [sys.executable, "-c", HANGING, part, *words[words.index("serve") :]]


def last_line(log: Path) -> str:
    return log.read_text().splitlines()[-1]


def test_a_server_whose_ledger_hangs_ends_and_its_last_line_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with child(command(tmp_path / "data", "ledger"), log, serve_variables()) as (process, ready):
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{ready['http']}/clusters", json=CLUSTER, timeout=END_SECONDS)
        assert process.wait(END_SECONDS) == 70
        assert "LedgerFailed" in last_line(log)


def test_a_hanging_thread_delays_a_stop_only_up_to_a_limit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with child(command(tmp_path / "data", "history"), log, serve_variables()) as (process, _):
        until(lambda: "hangs" in log.read_text())
        process.terminate()
        assert process.wait(END_SECONDS) == 0
        assert "took more than 5 s" in last_line(log)
