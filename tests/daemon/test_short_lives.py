"""The facts of servers that are killed soon count towards the next checkpoint."""

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx

from moorage.testing.daemon_process import child, serve_command, serve_variables
from moorage_client import BlockingClient
from moorage_policies import catalog

FACTS = 100
RULE = catalog.document("first_fit")
NODE = {"id": "n", "gpus": {"count": 1}, "vcpus": {"count": 64}, "memory": 1000}
CLUSTER = {"id": "c", "nodes": {"count": 1, "nodeData": [NODE]}}
CPU, TERMS = {"cpu_milli": 1}, {"ttl_seconds": 60}
LEASES = 35  # At least two facts each: less than FACTS in one life, more in two.


def test_servers_that_run_only_shortly_write_checkpoints(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "stderr.log"
    variables = {**serve_variables(), "MOORAGE_CHECKPOINT_EVERY_FACTS": str(FACTS)}
    written = []
    for _ in range(2):
        with child(serve_command(data), log, variables) as (process, ready):
            for path, document in (("policy", RULE), ("clusters", CLUSTER)):
                httpx.post(f"{ready['http']}/{path}", json=document, timeout=60)
            with BlockingClient(ready["ws"]) as client:
                for _ in range(LEASES):
                    lease = client.ask(RULE["policy_rule_uri"], resources=CPU, lease=TERMS).lease
                    assert lease is not None
                    client.release(lease.id, lease.token)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        with closing(sqlite3.connect(data / "ledger.db")) as database:
            written.append(database.execute("SELECT count(*) FROM checkpoint").fetchone()[0])
    assert written == [0, 1]
