"""`python -m benchmarks.faults`: plays faults on two servers, and checks all answers to clients.

Without `--url`, it starts both servers and PostgreSQL on this machine. With `--url`, it uses your
servers and your faults, which are shell commands that each make another server lead.
"""

import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from benchmarks.command_line import run_command
from benchmarks.faults.database import PGBOUNCER, find_programs, running_postgres
from benchmarks.faults.history import longest_pause, quantile, violations
from benchmarks.faults.load import Load, Target
from benchmarks.faults.servers import CLUSTER, POLICY, ServerPair, ServerSeat
from moorage.commands import display
from moorage.commands.errors import command_errors
from moorage.commands.options import JsonFlag
from moorage.lab.errors import CommandError

ANSWERS_BETWEEN: Final = 30
"""Number of answers to clients that must come before each fault, and after it."""
DATABASE_MEBIBYTES: Final = 1024
"""Mebibytes of the disk of the database and its standby."""
FULL: Final = 0 if os.getuid() else 2
"""Default number of disks to fill; only root can make small disks."""
SHOWN: Final = 5
"""Maximum number of violations of each law that are printed."""

Nemesis = Callable[[ServerPair, ServerSeat, Callable[[], Awaitable[None]]], Awaitable[None]]
NEMESES: Final[dict[str, tuple[Nemesis, bool]]] = {
    "killed": (ServerPair.kill, True),
    "frozen": (ServerPair.freeze, True),
    "partitioned": (ServerPair.partition, True),
    "planned": (ServerPair.resign, True),
    "sessions ended": (ServerPair.end_sessions, True),
    "database restarted": (ServerPair.restart_database, False),
    "standby promoted": (ServerPair.promote_standby, False),
    "clients cut off": (ServerPair.cut_off_clients, False),
    "clock set": (ServerPair.skew, True),
    "pooler between": (ServerPair.pool, True),
    "server's disk full": (ServerPair.fill_folder, True),
    "database's disk full": (ServerPair.fill_database, True),
}
"""Each fault: its function, and whether it ends the leader, so that the other server leads."""


class FaultRun:
    """Records one run: its history, and the times of its faults."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self._faults: list[tuple[str, float, float]] = []

    async def befall(self, name: str, fault: Callable[[], Awaitable[object]]) -> None:
        """Run one fault, and record its start and end."""
        begun = time.monotonic()
        await fault()
        ended = time.monotonic()
        self._faults.append((name, begun, ended))
        _say(f"{name}: {ended - begun:.2f} s, {len(self.load.history.grants)} grants")

    def report(self, seed: int) -> dict[str, Any]:
        """Return the pauses during each kind of fault, and the violations of the laws."""
        history = self.load.history
        times = [each.answered_at for each in history.answers()]
        pauses: dict[str, list[float]] = {}
        for name, begun, ended in self._faults:
            pauses.setdefault(name, []).append(longest_pause(times, begun, ended))
        return {
            "seed": seed,
            "grants": len(history.first_grants()),
            "requests_repeated": len(history.grants) - len(history.first_grants()),
            "releases": len(history.releases),
            "servers_that_led": len({each.server for each in history.answers()} - {""}),
            "grants_in_the_ledger": len(history.committed),
            "pauses": {name: _quantiles(each) for name, each in pauses.items()},
            "violations": violations(history),
        }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "times": len(seconds),
        "p50_seconds": round(quantile(seconds, 0.5), 3),
        "p99_seconds": round(quantile(seconds, 0.99), 3),
        "max_seconds": round(max(seconds), 3),
    }


async def play(
    folder: Path, counts: Mapping[str, int], clients: int, seed: int, minutes: float
) -> dict[str, Any]:
    """Start two servers and play faults on them in random order; start no fault after `minutes`.

    Raises:
        CommandError: The servers do not start again.
    """
    programs = _check(counts)
    own, databases = counts["server's disk full"], counts["database's disk full"]
    draw = random.Random(seed)
    faults = [name for name, count in counts.items() for _ in range(count)]
    draw.shuffle(faults)
    with running_postgres(programs, DATABASE_MEBIBYTES if databases else 0) as postgres:
        postgres.add_standby()
        pair = ServerPair(folder, postgres, draw, small_disks=bool(own))
        async with pair.running():
            target = Target(pair.urls, POLICY, (CLUSTER,), 1, pair.name_server, alone=True)
            run = FaultRun(Load(target, clients, seed))

            end = time.monotonic() + 60 * minutes

            async def work() -> None:
                for name in itertools.takewhile(lambda _: time.monotonic() < end, faults):
                    await _befall(run, pair, name, draw)
                await run.load.answers(ANSWERS_BETWEEN)

            await run.load.during(work)
        run.load.history.committed = await pair.committed()
    return run.report(seed)


def _check(counts: Mapping[str, int]) -> Path:
    """Return the folder of PostgreSQL's programs; refuse if a program for the faults is missing."""
    programs = find_programs()
    if programs is None:
        raise CommandError("PostgreSQL is not installed: apt-get install postgresql")
    if counts["pooler between"] and not Path(PGBOUNCER).exists():
        raise CommandError("PgBouncer is not installed: apt-get install pgbouncer, or --pooled 0")
    if os.getuid() and (counts["server's disk full"] or counts["database's disk full"]):
        raise CommandError(
            "only root can make small disks; pass --full 0 --full-database 0 to leave them out"
        )
    return programs


async def _befall(run: FaultRun, pair: ServerPair, name: str, draw: random.Random) -> None:
    """Play one fault on the leader, and wait until the servers that ended are back."""
    leader, _ = await pair.roles()
    await run.load.answers(ANSWERS_BETWEEN)
    await asyncio.sleep(draw.random())
    generation, label = leader.generation, leader.label
    nemesis, deposes = NEMESES[name]
    settle = (
        partial(run.load.answers, 1, label)
        if deposes
        else partial(run.load.answers, ANSWERS_BETWEEN)
    )
    await run.befall(name, partial(nemesis, pair, leader, settle))
    if deposes:
        await leader.follows(generation)


async def play_elsewhere(
    target: Target, clients: int, faults: Sequence[str], seed: int
) -> dict[str, Any]:
    """Run commands as faults against servers that are already running.

    Raises:
        CommandError: A command failed.
    """
    rounds = itertools.count()
    number = next(rounds)
    # A server may lead again after another fault, as a new process.
    target = replace(target, name_server=lambda url: f"{url} in round {number}")
    run = FaultRun(Load(target, clients, seed))

    async def fault(command: str) -> None:
        nonlocal number
        process = await asyncio.create_subprocess_shell(command, stdout=sys.stderr)
        if await process.wait():
            raise CommandError(f"{command!r} ended with exit code {process.returncode}")
        await run.load.answers(ANSWERS_BETWEEN)
        number = next(rounds)

    async def work() -> None:
        for command in faults:
            await run.load.answers(ANSWERS_BETWEEN)
            await run.befall(command, partial(fault, command))
        await run.load.answers(ANSWERS_BETWEEN)

    await run.load.during(work)
    return run.report(seed)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _tables(report: Mapping[str, Any]) -> list[Table]:
    """Return the report as tables: pauses during faults, and violations of the laws."""
    about = ", ".join(
        f"{value} {name.replace('_', ' ')}"
        for name, value in report.items()
        if isinstance(value, int) and name != "seed"
    )
    faults = Table(title=f"seed {report['seed']}: {about}")
    faults.add_column("fault")
    for heading in ("times", "p50 s", "p99 s", "max s"):
        faults.add_column(heading, justify="right")
    for name, row in report["pauses"].items():
        faults.add_row(name, *map(str, row.values()))
    laws = Table(caption="the pauses are those between two answers at a client")
    laws.add_column("law")
    laws.add_column("violations", justify="right")
    for name, found in report["violations"].items():
        laws.add_row(name, str(len(found)))
    return [faults, laws]


def main(  # One parameter per option.
    kills: Annotated[int, typer.Option(min=0, help="Kills of the leader by SIGKILL.")] = 10,
    frozen: Annotated[int, typer.Option(min=0, help="Pauses of the leader.")] = 5,
    partitions: Annotated[
        int, typer.Option(min=0, help="One-way partitions between leader and database.")
    ] = 5,
    planned: Annotated[int, typer.Option(min=0, help="`moored lead --resign`, or SIGTERM.")] = 5,
    ended: Annotated[int, typer.Option(min=0, help="Ends of the leader's sessions.")] = 2,
    restarts: Annotated[int, typer.Option(min=0, help="Crashes of the database.")] = 2,
    promoted: Annotated[int, typer.Option(min=0, help="Losses of the database's primary.")] = 2,
    cut_off: Annotated[int, typer.Option(min=0, help="Partitions: leader and clients.")] = 2,
    skewed: Annotated[int, typer.Option(min=0, help="Changes of the leader's clock.")] = 2,
    pooled: Annotated[int, typer.Option(min=0, help="Starts of a server on PgBouncer.")] = 2,
    full: Annotated[int, typer.Option(min=0, help="Fillings of the leader's disk.")] = FULL,
    full_database: Annotated[
        int, typer.Option(min=0, help="Fillings of the database's disk.")
    ] = FULL,
    seed: Annotated[int, typer.Option(help="Seed of the order of faults, and of the clients.")] = 7,
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 6,
    minutes: Annotated[
        float, typer.Option(min=0, help="No fault starts after these minutes.")
    ] = float("inf"),
    url: Annotated[
        str | None,
        typer.Option(help="Your own servers, `ws://a:8765,ws://b:8765`; then --fault is needed."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable: a shell command that makes another of your servers lead."),
    ] = None,
    policy: Annotated[str, typer.Option(help="With --url: the policy to use.")] = POLICY,
    gpus: Annotated[int, typer.Option(min=1, help="With --url: GPUs of each lease.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Make servers fail under load, and check that all answers to clients were correct.

    The exit code is 1 if an answer was wrong.
    """
    with command_errors():
        if (url is None) != (not fault):
            raise CommandError("pass --url and --fault together, or neither of them")
        if url is not None:
            target = Target(url, policy, (), gpus, str, alone=False)
            report = asyncio.run(play_elsewhere(target, clients, fault or (), seed))
        else:
            of_server = kills, frozen, partitions, planned, ended
            of_database = restarts, promoted, cut_off
            of_place = skewed, pooled, full, full_database
            counts = dict(zip(NEMESES, (*of_server, *of_database, *of_place), strict=True))
            with tempfile.TemporaryDirectory(prefix="moorage-faults-") as folder:
                report = asyncio.run(play(Path(folder), counts, clients, seed, minutes))
    if as_json:
        display.print_json(report)
    else:
        display.show(*_tables(report))
    broken = {name: found for name, found in report["violations"].items() if found}
    for name, found in broken.items():
        _say(f"{name}: {'; '.join(found[:SHOWN])}")
    raise typer.Exit(int(bool(broken)))


if __name__ == "__main__":
    run_command(main)
