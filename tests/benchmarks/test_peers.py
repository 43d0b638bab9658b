"""Each peer of Moorage runs one protocol, and the page shows the stored runs."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.table import Table

from benchmarks.peers import report
from benchmarks.peers.__main__ import PEERS
from benchmarks.peers.etcd_transactions import decode, encode
from benchmarks.peers.measure import check, measure
from benchmarks.peers.session import Peer, devices
from moorage.bench.placements import Booking, closed_loop
from moorage.commands import display
from moorage.lab.errors import CommandError
from moorage.lab.trace import TraceNode

pytestmark = pytest.mark.heavy

NODES = [TraceNode(f"n{number:02}", 64_000, 262_144, 8, "A") for number in range(20)]
HOME_MADE = [peer.name for peer in PEERS.values() if peer.group == "home-made"]


def test_self_written_schedulers_book_nothing_twice(tmp_path: Path) -> None:
    missing = {peer.name: peer.install for peer in PEERS.values() if not peer.version()}
    if lacking := {name: missing[name] for name in HOME_MADE if name in missing}:
        pytest.skip(f"missing here: {lacking}")
    rows = [f"{n.name},{n.cpu_milli},{n.memory_mib},{n.gpus},{n.model}" for n in NODES[:8]]
    path = tmp_path / "nodes.csv"
    path.write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *rows]))
    command = [sys.executable, "-m", "benchmarks.peers", "home-made", "--rounds", "1", "--json"]
    done = subprocess.run([*command, "--nodes", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["rows"]) == HOME_MADE
    assert all(len(row["runs"]) == len(row["moorage"]) == 1 for row in found["rows"].values())


@pytest.mark.parametrize("name", ["kube-scheduler", "kueue"])
async def test_schedulers_of_kubernetes_book_nothing_twice(name: str) -> None:
    peer = PEERS[name]
    if peer.version() is None:
        pytest.skip(f"missing here: {peer.install}")
    few = NODES[:2]
    found = await measure(peer, few)
    assert found.per_second > 0


def test_a_fleet_that_is_too_small_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,8,A\n")
    command = [sys.executable, "-m", "benchmarks.peers", "dask", "--nodes", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "expected nodes with 20 GPUs or more" in done.stderr


def test_the_error_for_an_unknown_peer_lists_the_known_ones() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "redis-script" in done.stdout + done.stderr


class Shelf:
    """A session in memory, which may grant one GPU several times."""

    pids: Sequence[int] = ()

    def __init__(self, free: list[Booking], *, keeps: bool) -> None:
        self._free, self._keeps = free, keeps
        self._freed = asyncio.Event()

    async def place(self) -> Booking | None:
        if not self._free:
            return None
        booking = self._free.pop()
        return booking if self._keeps else booking._replace(node="n00", device="0")

    async def release(self, booking: Booking) -> None:
        self._free.append(booking)
        self._freed.set()

    async def wait(self, parked: asyncio.Event) -> Booking:
        parked.set()
        await self._freed.wait()
        self._freed.clear()
        return self._free.pop()


def shelf(*, keeps: bool) -> Peer:
    @contextlib.asynccontextmanager
    async def run(nodes):
        yield Shelf([Booking(None, *gpu) for gpu in devices(nodes)], keeps=keeps)

    return Peer("shelf", "home-made", "Shelf", "", "", "", lambda: "1", run)


class Dying(Shelf):
    """A session whose server ends at the first request and leaves it without an answer."""

    def __init__(self, server: asyncio.subprocess.Process) -> None:
        super().__init__([], keeps=True)
        self.pids, self._server = [server.pid], server

    async def place(self) -> Booking | None:
        self._server.kill()
        return await asyncio.get_running_loop().create_future()


class Confused(Shelf):
    """A session whose client raises an error that is not a refusal."""

    async def place(self) -> Booking | None:
        raise ZeroDivisionError


@contextlib.asynccontextmanager
async def dying(nodes):
    server = await asyncio.create_subprocess_exec("sleep", "infinity")
    yield Dying(server)
    await server.wait()


@contextlib.asynccontextmanager
async def confused(nodes):
    yield Confused([], keeps=True)


@pytest.mark.parametrize(
    ("run", "why"), [(dying, "the peer's server ended"), (confused, "ZeroDivision")]
)
async def test_a_peer_that_fails_ends_its_run(run, why: str) -> None:
    peer = Peer("odd", "home-made", "Odd", "", "", "", lambda: "1", run)
    async with asyncio.timeout(60):
        with pytest.raises(CommandError, match=why):
            await measure(peer, NODES)


async def test_a_refusal_while_gpus_are_free_raises_one_error() -> None:
    with pytest.raises(CommandError, match="refused while GPUs are free"):
        await closed_loop(Shelf([], keeps=True).place, 100)


async def test_a_peer_that_books_twice_is_refused() -> None:
    with pytest.raises(CommandError, match="shelf booked twice"):
        await measure(shelf(keeps=False), NODES)
    found = await measure(shelf(keeps=True), NODES)
    assert found.per_second > 0


def test_more_pods_on_a_node_than_it_has_gpus_are_refused() -> None:
    held = [Booking(None, node.name) for node in NODES for _ in range(node.gpus)]
    check("peer", NODES, held)
    with pytest.raises(CommandError, match="booked twice"):
        check("peer", NODES, [*held[1:], Booking(None, NODES[-1].name)])
    with pytest.raises(CommandError, match="159 bookings of 160 GPUs"):
        check("peer", NODES, held[1:])


def test_messages_for_etcd_are_read_as_they_were_written() -> None:
    assert encode((1, 300), (2, b"key")) == b"\x08\xac\x02\x12\x03key"
    assert decode(encode((1, 300), (2, b"a"), (2, b""))) == {1: [300], 2: [b"a", b""]}


def test_the_page_of_peers_shows_the_stored_runs() -> None:
    root = Path(__file__).parents[2]
    text = (root / report.PAGE_FILE).read_text()
    assert report.page(text, report.read_stored()) == text


def test_a_table_wider_than_the_terminal_is_printed_as_lists(
    capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = Table(title="wide")
    for number in range(12):
        table.add_column(f"heading {number}")
    table.add_row(*(f"value {number}" for number in range(12)))
    display.show(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for number in range(12):
        assert any(f"heading {number} " in line and f"value {number} " in line for line in lines)
