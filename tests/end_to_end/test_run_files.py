"""`moorage run --out DIR` fetches a run's files from the server or an agent, and no others."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import Fleet, serve_fleet
from served import until

from moorage.backends.local.machine import this_node

pytestmark = pytest.mark.heavy

WRITES = """
mkdir -p a/b; seq 200000 >a/b/numbers; printf '\\0\\1' >raw; ln -s /etc/passwd link; mkfifo pipe
ln -s /etc folder; touch empty; exit 3
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serve_fleet(tmp_path_factory.mktemp("files"), "--here") as fleet:
        fleet.agent("box", fleet.token())
        until(lambda: "unavailable" not in fleet.node("box"))
        yield fleet


def begin(fleet: Fleet, command: str) -> tuple[dict, dict]:
    """Return a lease whose command has written `done`, and a message about its files."""
    lease = fleet.ask(command)
    message = {"lease": lease["id"], "token": lease["token"]}
    read = {"op": "logs", "wait_seconds": 10, **message}
    until(lambda: fleet.server.say(read)[0]["data"]["text"].endswith("done\n"))
    return lease, {"op": "files", **message}


@pytest.mark.parametrize("place", ["lab", "here"])
def test_moorage_run_with_out_fetches_the_files_of_the_command(
    fleet: Fleet, tmp_path: Path, place: str
) -> None:
    cluster = place if place == "lab" else this_node()
    out = tmp_path / "new" / "out"
    words = ["run", "--cluster", cluster, "--cpu-milli", "100", "--out", str(out)]
    done = fleet.server.moorage(*words, "--", "sh", "-c", WRITES)
    assert done.returncode == 3, done.stderr
    numbers = "".join(f"{number}\n" for number in range(1, 200_001))
    assert (out / "a" / "b" / "numbers").read_text() == numbers
    assert (out / "raw").read_bytes() == b"\0\1"
    assert sorted(each.name for each in out.iterdir()) == ["a", "empty", "raw"]
    for name in ("link", "folder"):
        assert f"not fetched: {name}: it is a link" in done.stderr
    assert "not fetched: pipe: it is not a plain file" in done.stderr
    full = fleet.server.moorage(*words, "--", "true")
    assert "expected an empty folder" in full.stderr


def test_a_run_whose_files_cannot_all_be_fetched_reports_that_and_has_exit_code_1(
    fleet: Fleet, tmp_path: Path
) -> None:
    words = ["run", "--cluster", "lab", "--cpu-milli", "100", "--out", str(tmp_path / "out")]
    done = fleet.server.moorage(*words, "--", "sh", "-c", "echo all >file; ln -s file link")
    assert (done.returncode, (tmp_path / "out" / "file").read_text()) == (1, "all\n")


def test_no_path_leaves_the_folder_of_a_run(fleet: Fleet) -> None:
    lease, message = begin(fleet, WRITES.replace("exit 3", "echo done; sleep 1000"))
    outside = "../order.json", "/etc/passwd", "folder/passwd"
    for path in (*outside, "link", "a/../raw", "pipe", "a", "no"):
        (answer,) = fleet.server.say(message | {"path": path})
        assert answer["error"]["code"] == "not_found", answer
    (answer,) = fleet.server.say(message | {"token": "wrong"})
    assert not answer["success"]
    assert fleet.server.release(lease)["success"]


def test_a_link_in_place_of_the_folder_of_a_run_is_not_followed(fleet: Fleet) -> None:
    lease, message = begin(fleet, "cd ..; rm -rf work; ln -s /etc work; echo done; sleep 1000")
    (answer,) = fleet.server.say(message)
    assert "passwd" not in str(answer), "if the jail allows such a link"
    assert fleet.server.release(lease)["success"]


def test_a_run_in_a_folder_of_the_user_offers_no_files(fleet: Fleet) -> None:
    spec = {"category": "process", "command": ["sleep", "1000"], "workdir": os.getcwd()}  # noqa: PTH109  # The spec needs a text.
    lease = fleet.server.ask(
        clusters=["lab"],
        resources={"cpu_milli": 100},
        lease={"ttl_seconds": 600},
        provision={"backend": "local", "spec": spec},
    )["lease"]
    until(lambda: fleet.state(lease) == "active")
    message = {"op": "files", "lease": lease["id"], "token": lease["token"]}
    (answer,) = fleet.server.say(message)
    assert answer["error"]["code"] == "unsupported", answer
    assert fleet.server.release(lease)["success"]
