"""The peer Slurm: an `salloc` for each placement, on eight slurmd that share the fleet's GPUs.

All programs run as one user, without root, cgroup or accounts. The GPUs of the fleet are on eight
large nodes: each node needs its own slurmd, and a node without one would take seconds for each job.
"""

import asyncio
import contextlib
import getpass
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.peers.servers import find_program, folder, free_port, program, version_of
from benchmarks.peers.session import Peer
from moorage.bench.placements import Booking, Nodes
from moorage.lab.errors import CommandError

SLURMDS: Final = 8
CPUS: Final = 1024
"""CPUs of each node: more than its GPUs, so that CPUs never limit the jobs, which take one each."""
REFUSED_SECONDS: Final = 3.0
"""Seconds after which a request without a GPU counts as refused; in Slurm, it would wait."""
REFUSED_TRIES: Final = 10
ALLOCATORS_MAX: Final = 16
"""Maximum `salloc` processes at a time; each takes 10 ms of a processor to start."""

_CONFIG: Final = """\
ClusterName=bench
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/ctld.pid
SlurmdPidFile={home}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,default_queue_depth=10000,sched_interval=1,bf_interval=1
MaxJobCount=20000
ReturnToService=2
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class _Session:
    def __init__(self, pids: Sequence[int], variables: dict[str, str]) -> None:
        self.pids = pids
        self._variables = variables
        self._allocators = asyncio.Semaphore(ALLOCATORS_MAX)

    async def place(self) -> Booking | None:
        async with self._allocators, self._ask() as said:
            async for job, line in said:
                if "Granted" in line:
                    return Booking(job)
                if "queued and waiting" in line and not await self._starts(job):
                    return None
        raise CommandError("salloc ended before it had a GPU")

    async def release(self, booking: Booking) -> None:
        await self._run("scancel", str(booking.handle))

    async def wait(self, parked: asyncio.Event) -> Booking:
        async with self._ask() as said:
            async for job, line in said:
                if "Granted" in line:
                    return Booking(job)
                if "queued and waiting" in line:
                    parked.set()
        raise CommandError("salloc ended before it had a GPU")

    async def _starts(self, job: int) -> bool:
        """Return whether a queued job starts within `REFUSED_SECONDS`; cancel it if not."""
        for _ in range(REFUSED_TRIES):
            state = await self._run("squeue", "--noheader", "--format=%t", f"--job={job}")
            if state.strip() == "R":
                return True
            await asyncio.sleep(REFUSED_SECONDS / REFUSED_TRIES)  # Slurm has no event for that.
        await self._run("scancel", str(job))
        return False

    async def _run(self, *command: str) -> str:
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=self._variables
        )
        output, _ = await child.communicate()
        if child.returncode:
            raise CommandError(f"{' '.join(command)} failed")
        return output.decode()

    @contextlib.asynccontextmanager
    async def _ask(self) -> AsyncIterator[AsyncIterator[tuple[int, str]]]:
        """Run `salloc` until it ends; yield the lines of its output, each with its job's number."""
        child = await asyncio.create_subprocess_exec(
            *("salloc", "--no-shell", "--nodes=1", "--ntasks=1", "--gres=gpu:1"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._variables,
        )
        assert child.stderr is not None
        yield _lines(child.stderr)
        await child.wait()  # `salloc` ends with the grant, or with its job.


async def _lines(output: asyncio.StreamReader) -> AsyncIterator[tuple[int, str]]:
    async for line in output:
        if job := re.search(r"(?:allocation|job) (\d+)", line.decode()):
            yield int(job[1]), line.decode()


def _configure(home: Path, ports: dict[str, int], port: int, gpus: int) -> None:
    """Write the configuration of Slurm's nodes; each GPU device is a link to /dev/null."""
    sizes = [gpus // SLURMDS + (number < gpus % SLURMDS) for number in range(SLURMDS)]
    for name in ("state", "spool", "dev"):
        (home / name).mkdir()
    for number in range(max(sizes)):
        (home / "dev" / f"gpu{number}").symlink_to("/dev/null")
    rows = [
        f"NodeName={name} NodeHostName=localhost NodeAddr=127.0.0.1 Port={at} CPUs={CPUS}"
        f" RealMemory=64000 Gres=gpu:{size}"
        for (name, at), size in zip(ports.items(), sizes, strict=True)
    ]
    devices = [
        f"NodeName={name} Name=gpu File={home}/dev/gpu[0-{size - 1}]"
        for name, size in zip(ports, sizes, strict=True)
    ]
    (home / "gres.conf").write_text("\n".join(["AutoDetect=off", *devices, ""]))
    (home / "slurm.conf").write_text(
        _CONFIG.format(port=port, user=getpass.getuser(), home=home, nodes="\n".join(rows))
    )


@contextlib.contextmanager
def _munge(home: Path) -> Iterator[None]:
    """Run the service that authenticates Slurm's programs, until the block ends."""
    (home / "munge.key").write_bytes(os.urandom(1024))
    (home / "munge.key").chmod(0o600)
    parts = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
    parts |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    flags = [f"--{flag}={home / name}" for flag, name in parts.items()]
    subprocess.run([_program("munged"), "--force", *flags], check=True)  # noqa: S603  # Our own.
    try:
        yield
    finally:
        subprocess.run([_program("munged"), "--stop", flags[1]], check=False)  # noqa: S603  # As above.


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    with folder() as home:
        ports = {f"n{number}": free_port() for number in range(SLURMDS)}
        port, config = free_port(), str(home / "slurm.conf")
        _configure(home, ports, port, sum(node.gpus for node in nodes))
        variables = {"SLURM_CONF": config}
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(_munge(home))

            async def start(name: str, at: int, *flags: str) -> int:
                command = [_program(name), "-D", "-f", config, *flags]
                log = home / f"{name}-{at}.log"
                return await stack.enter_async_context(program(command, at, log, variables))

            pids = [await start("slurmctld", port)]
            pids += [await start("slurmd", at, "-N", name) for name, at in ports.items()]
            session = _Session(pids, {**os.environ, **variables})
            while (first := await session.place()) is None:
                pass  # The nodes have not registered yet.
            await session.release(first)
            yield session


def _program(name: str) -> str:
    return find_program(name, f"/usr/sbin/{name}") or name


def _version() -> str | None:
    if not all(
        find_program(name, f"/usr/sbin/{name}") for name in ("munged", "slurmctld", "slurmd")
    ):
        return None
    return version_of(_program("slurmctld"), "-V")


PEER: Final = Peer(
    name="slurm",
    group="schedulers",
    title="Slurm",
    decides=f"one of {SLURMDS} nodes, by a CPU and a GPU",
    stores="seconds later",
    install="apt-get install slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge",
    version=_version,
    run=_run,
)
