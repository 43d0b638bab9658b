"""On a full disk, the daemon grants no new lease, can end leases, and loses no lease."""

import json

import pytest
from disks import fill
from served import cluster, serving, until

SHORT = {"ttl_seconds": 3_600}


@pytest.mark.heavy
def test_a_full_disk_ends_no_daemon_and_loses_no_lease(disk):
    data = disk / "data"
    with serving(data) as server:
        server.fill(cluster("east", nodes=200, gpus=8))
        held = [server.ask(resources={"gpus": 1}, lease=SHORT)["lease"] for _ in range(5)]
        filler = disk / "filler"
        fill(filler)
        # Meanwhile only the catalog is written, not the ledger.
        assert server.http.post("/clusters", json=cluster("west")).status_code == 503
        until(lambda: server.http.get("/readyz").json()["details"]["disk"] == "full")
        refused = []

        def is_refused() -> bool:
            reply = server.ask(resources={"gpus": 1}, lease=SHORT)
            if reply["success"]:
                held.append(reply["lease"])
                return False
            refused.append(reply["error"])
            return True

        until(is_refused)
        assert refused[0]["code"] == "unavailable"
        assert "disk of the server is full" in refused[0]["reason"]
        first = held.pop(0)
        ended = server.release(first)
        assert ended["lease"]["state"] == "ended"
        assert server.ask(resources={"gpus": 1})["success"], "advice needs no disk"
        assert server.http.get("/readyz").json()["details"]["disk"] == "full"
        assert "moorage_disk_full 1.0" in server.http.get("/metrics").text
        for _ in range(10):
            is_refused()
        filler.unlink()
        # Nothing is written meanwhile: the server notices free space by checking now and then.
        until(lambda: server.http.get("/readyz").json()["details"]["disk"] == "ok")
        held.append(server.ask(resources={"gpus": 1}, lease=SHORT)["lease"])
        until(lambda: "disk_has_room" in server.log())
        lines = [json.loads(line) for line in server.log().splitlines()]
        assert [line["event"] for line in lines if line["level"] == "error"] == ["disk_full"]
    with serving(data) as server:
        found = {each["id"] for each in server.held()}
        assert {lease["id"] for lease in held} <= found
        assert first["id"] not in found
