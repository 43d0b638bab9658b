"""`moorage run`, `exec` and `logs`: commands on leased resources."""

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import Struct

from moorage.model import Code
from moorage.records.fields import ATTEMPTS_MAX, TTL_SECONDS, StartNumber
from moorage.records.json_values import JsonObject
from moorage.records.leases import Lease
from moorage.records.replies import ExecutionAnswer, OutputPart
from moorage_client.answers import UnreadableError, read_as
from moorage_client.cli.asking import (
    LOOK_SECONDS,
    LeaseArgument,
    Preemptible,
    keep,
    read_stored_token,
)
from moorage_client.cli.fetching import check_folder, fetch
from moorage_client.cli.output import Passed, note, print_json, where, write_bytes
from moorage_client.cli.session import CommandSession
from moorage_client.errors import LeaseLost, MoorageError, NotFound, RequestRefused

if TYPE_CHECKING:
    from moorage_client.client import Client

DEFAULT_POLICY: Final = "best_fit:1.0-stable"
DEFAULT_BACKEND: Final = "local"
CONTAINERS_ONLY: Final = frozenset({"kubernetes"})
FOLLOW_SECONDS: Final = 10.0
"""Longest wait of one request for more output, in seconds."""
END_SECONDS_MAX: Final = 30.0
"""Longest wait, in seconds, from the end of a workload to the end of its lease."""
LEAVE_SECONDS: Final = 2.0
"""Least seconds between a first Ctrl-C and a second one that ends the command at once."""
_OVER: Final = frozenset({"succeeded", "failed", "stopped"})
"""Phases of workloads that have ended."""
_STARTS_AGAIN: Final = frozenset({"failing", "queued"})
"""States of a lease whose workload failed and has attempts left."""
SPARE_SECONDS: Final = 30.0
"""Seconds that the answer about a command may take beyond the command's time limit."""
REQUEUES_MAX: Final = ATTEMPTS_MAX - 1
"""Maximum restarts of a workload, the first start not counted."""
NOT_FETCHED: Final = 1
"""Exit code of a successful run whose files were not all fetched."""
_NOT_RUN: Final = (126, 127)
"""Exit codes of a shell for a program that cannot be run or does not exist."""
_UNHEARD: Final = "had not heard the server"
"""Words in a lease's reason if a machine without contact to the server ended the workload; written
by the supervisor of the backend `local`."""
_SIGNALLED: Final = 128
"""Base of a shell's exit code for a command that a signal ended: add the signal's number."""

_Command = Annotated[list[str], typer.Argument(help="The command, after `--`")]
_LeaseToken = Annotated[
    str | None, typer.Option(help="Token of the lease, if it is another tenant's")
]


def run(
    session: CommandSession,
    command: _Command,
    gpus: Annotated[int, typer.Option("--gpus", "-g", min=0, help="GPUs")] = 0,
    gpu_milli: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Thousandths of each GPU (else 1000)")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Accepted GPU model")] = None,
    cpu_milli: Annotated[int | None, typer.Option(min=0, help="Thousandths of CPU cores")] = None,
    memory_mib: Annotated[int | None, typer.Option(min=0, help="Memory in MiB")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes of a gang, each with these resources")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            "-p",
            envvar="MOORAGE_POLICY",
            help=f"The policy (else {DEFAULT_POLICY}, or another registered one)",
        ),
    ] = "",
    cluster: Annotated[list[str] | None, typer.Option(help="Cluster to choose from")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait in the queue")] = 0.0,
    priority: Annotated[int, typer.Option(help="Higher priorities go first")] = 0,
    preemptible: Preemptible = False,
    image: Annotated[
        str | None, typer.Option(help="Run in a container of this image (else as a process)")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the command")] = None,
    workdir: Annotated[
        Path | None, typer.Option(help="Working directory (else this one; not for containers)")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Backend of the command (else local, or the only one)")
    ] = "",
    requeue: Annotated[
        int,
        typer.Option(
            min=0, max=REQUEUES_MAX, help="Start a failed command elsewhere, at most this often"
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Run in a new folder, and fetch the files into this empty folder"),
    ] = None,
) -> None:
    """Hold GPUs while a command runs on them; print its output and exit with its exit code.

    The command gets no input. Its output is printed unchanged, including binary data and control
    characters, since it is your own command. With --json the output is text.
    """
    if image is not None and workdir is not None:
        raise typer.BadParameter(
            "--workdir is only for processes; a container's image sets its folder"
        )
    if out is not None and (image is not None or workdir is not None):
        raise typer.BadParameter("--out runs a process in a new folder: omit --image and --workdir")
    fetched = None if out is None else check_folder(out)
    spec: JsonObject = {"command": command, "environment": _variables(env or [])}
    folder = "" if out is not None else str((workdir or Path.cwd()).absolute())
    resources = {
        "gpus": gpus,
        "gpu_milli": gpu_milli,
        "models": model or None,
        "cpu_milli": cpu_milli,
        "memory_mib": memory_mib,
        "nodes": nodes,
    }
    request: JsonObject = {"ttl_seconds": TTL_SECONDS, "wait_seconds": wait, "priority": priority}
    request |= {"preemptible": preemptible, "clusters": cluster or None}
    request["resources"] = {name: value for name, value in resources.items() if value is not None}
    output = bytearray()
    write = output.extend if session.json else write_bytes

    async def hold(client: "Client", choice: _Choice) -> tuple[str, int]:
        provision: JsonObject = {
            "backend": choice.backend,
            "spec": spec | _place(choice.backend, image, folder),
        }
        if requeue:
            provision |= {"on_failure": "requeue", "attempts_max": requeue + 1}
        whole = {**request, "provision": provision}
        return await _hold(client, write, choice.policy, whole, fetched)

    async def work(client: "Client") -> tuple[str, int]:
        choice = _Choice(policy or DEFAULT_POLICY, backend or DEFAULT_BACKEND)
        while True:
            try:
                return await hold(client, choice)
            except RequestRefused as refused:  # No lease is granted yet.
                chosen = _another(choice, refused, policy, backend)
                if chosen is None or chosen == choice:
                    _name_option(refused)
                    raise
                choice = chosen

    name, code = session.run(work)
    if session.json:
        print_json({"lease": name, "exit_code": code, "output": output.decode(errors="replace")})
    raise typer.Exit(_exit_code(code))


class _Known(Struct):
    """The existing names that the server lists when it refuses an unknown name."""

    nearest: list[str] = []
    registered: list[str] = []
    backends: list[str] = []


@dataclass(frozen=True, slots=True)
class _Choice:
    """The policy and the backend that a run requests."""

    policy: str
    backend: str


def _name_option(refused: RequestRefused) -> None:
    """Make a refusal name the option in place of the field."""
    reason = refused.reason.replace("provision.backend: ", "--backend: ", 1)
    if reason != refused.reason:
        refused.reason, refused.field = reason, ""


def _another(choice: _Choice, refused: RequestRefused, policy: str, backend: str) -> _Choice | None:
    """Return a choice that this server supports; None if the user named the refused part."""
    known = read_as(_Known, refused.details)
    there = [*known.nearest, *known.registered]
    if refused.code == Code.UNKNOWN_POLICY and not policy and there:
        if choice.policy in there:
            return None
        note(
            f"moorage: using the policy {there[0]}, since {choice.policy} is not registered"
            " (--policy chooses another)"
        )
        return replace(choice, policy=there[0])
    if refused.field == "provision.backend" and not backend and known.backends:
        if len(known.backends) > 1:
            listed = ", ".join(known.backends)
            raise typer.BadParameter(f"--backend: expected a backend of this server: {listed}")
        return replace(choice, backend=known.backends[0])
    return None


def _place(backend: str, image: str | None, folder: str) -> JsonObject:
    """Return the place of a command: a container, or a folder on this machine."""
    if image is not None:
        return {"category": "container", "image": image}
    if backend in CONTAINERS_ONLY:
        expected = f"an image, since the backend {backend} only starts containers"
        raise typer.BadParameter(f"--image: expected {expected}")
    return {"workdir": folder} if backend == DEFAULT_BACKEND and folder else {}


async def _hold(
    client: "Client",
    write: Callable[[bytes], object],
    policy: str,
    request: JsonObject,
    out: Path | None,
) -> tuple[str, int]:
    """Hold a lease until its workload ends; return the lease's id and the exit code."""
    received = _stop_on_signals()
    code: int | None = None
    name = ""
    reader: _Reader | None = None
    lease = client.lease(policy.strip(), cancel_when_lost=False, **request)
    try:
        async with lease as held:
            name = held.id
            if not keep(held.lease, client.url):
                note(f"its token, for `moorage logs` and `exec`: {held.token}")
            note(f"lease {name} on {where(held.placement)}")
            reader = _Reader(client, name, held.token, write)
            code = await reader.follow()
            if out is not None and not await fetch(client, name, held.token, out):
                code = code or NOT_FETCHED
            if code:
                await _say_why(client, name, code)
    except LeaseLost:
        if code is None:
            raise
    except asyncio.CancelledError:
        if not received:
            raise
        if reader is not None:
            await _wait_end(client, name, reader)
        note(f"moorage: ended by {received[0].name}")
        return name, -received[0]
    assert code is not None
    return name, code


async def _say_why(client: "Client", lease: str, code: int) -> None:
    """Print why a workload was ended, for example by a preemption, or why it never ran.

    A command that ends by itself with an exit code needs no reason.
    """
    with contextlib.suppress(MoorageError):  # Without the reason, the exit code still counts.
        reason = str((await client.status(lease)).get("reason") or "")
        if reason and (code < 0 or code in _NOT_RUN or _UNHEARD in reason):
            note(f"moorage: lease {lease}: {reason}")


async def _wait_end(client: "Client", lease: str, reader: "_Reader") -> None:
    """Wait a limited time until a released lease's workload has ended; print its last output."""
    try:
        async with asyncio.timeout(END_SECONDS_MAX):
            with contextlib.suppress(MoorageError):  # For example, the workload never ran.
                await reader.follow()
            while (await client.status(lease)).get("state") == "ending":
                pause = LOOK_SECONDS  # Only watchers get an event of this change.
                await asyncio.sleep(pause)
    except TimeoutError:
        note(f"moorage: lease {lease} is still ending after {END_SECONDS_MAX:g} s")
    except MoorageError as error:
        note(f"moorage: it is not known whether lease {lease} ended: {error}")


def execute(
    session: CommandSession,
    lease: LeaseArgument,
    command: _Command,
    limit: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds that the command may take")
    ] = 60.0,
    workdir: Annotated[str, typer.Option(help="Working directory")] = "",
    user: Annotated[str, typer.Option(help="User, in a container")] = "",
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the command")] = None,
    lease_token: _LeaseToken = None,
) -> None:
    """Run a command inside the workload of a lease, and exit with its exit code.

    A terminal gets the output without control characters; a file or a pipe gets every byte.
    """
    message = {
        "op": "exec",
        "lease": lease,
        "token": lease_token or read_stored_token(lease),
        "command": command,
        "timeout_seconds": limit,
        "workdir": workdir,
        "user": user,
        "environment": _variables(env or []),
    }
    patient = replace(session, timeout=limit + SPARE_SECONDS)
    answer = patient.run(lambda client: client.call(message, idempotent=False))
    done = read_as(ExecutionAnswer, answer)
    if session.json:
        print_json(answer)
    else:
        passed = Passed()
        passed.write(done.output.encode())
        passed.end()
    raise typer.Exit(_exit_code(done.exit_code))


def logs(
    session: CommandSession,
    lease: LeaseArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the workload ends")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only this many last bytes (of the last start)")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Only the output of this start (else of every start)")
    ] = None,
    lease_token: _LeaseToken = None,
) -> None:
    """Print the output of a lease's workload, of all starts in order if it was started again.

    A terminal gets the output without control characters; a file or a pipe gets every byte. With
    --json the output is text, printed at the end.
    """
    if follow and attempt is not None:
        raise typer.BadParameter(
            "--attempt shows one start, --follow also later ones: give only one of these options"
        )
    token = lease_token or read_stored_token(lease)

    output, passed = bytearray(), Passed()
    write = output.extend if session.json else passed.write

    async def work(client: "Client") -> None:
        reader = _Reader(client, lease, token, write)
        reader.attempt = 0 if tail is not None else attempt or 1
        reader.offset = 0 if tail is None else -tail
        if tail == 0:  # Print no existing output: start after the last byte.
            await reader.skip()
        if follow:
            await reader.follow()
        else:
            await reader.read(only=attempt or 0)

    session.run(work)
    passed.end()
    if session.json:
        print_json({"lease": lease, "output": output.decode(errors="replace")})


class _Reader:
    """Prints the output of a workload, one start after the other."""

    def __init__(
        self, client: "Client", lease: str, token: str | None, write: Callable[[bytes], object]
    ) -> None:
        self._client = client
        self._lease = lease
        self._message = {"op": "logs", "lease": lease, "token": token, "encoding": "base64"}
        self._write = write
        self.attempt = 1
        self.offset = 0

    async def skip(self) -> None:
        """Move to the end of the output, so that only what comes later is printed."""
        answer = await self._client.call(self._message | {"offset": -1, "attempt": self.attempt})
        part = read_as(OutputPart, answer)
        self.attempt, self.offset = part.attempt, part.offset

    async def read(self, only: int) -> None:
        """Print the output of start `only`; 0: of the current start and all later ones."""
        while True:
            part = await self._next(0.0, skip=not only)
            if part.over or not (part.base64 or part.attempt > self.attempt):
                return
            if only and part.attempt != only:
                return
            self._go_on(part)

    async def follow(self) -> int:
        """Print the output until the workload ends; return the workload's exit code.

        Raises:
            LeaseLost: The workload never started, or its end is not known; the reason has details.
        """
        trouble = ""
        while True:
            try:
                part = await self._next(FOLLOW_SECONDS, skip=True)
            except NotFound as error:
                raise await self._lost(str(error)) from error
            except RequestRefused as error:  # A workload on an unreachable machine runs on.
                if error.code != Code.ENGINE_FAILED:
                    raise
                if not await self._runs():
                    raise await self._lost(error.reason) from error
                if error.reason != trouble:
                    trouble = error.reason
                    note(f"moorage: waiting: {trouble}")
                await asyncio.sleep(LOOK_SECONDS)
                continue
            if part.over:
                if part.exit_code is None:  # The workload never ran, or its end was not seen.
                    raise await self._lost("it is not known how the workload ended")
                return part.exit_code
            self._go_on(part)

    async def _next(self, wait_seconds: float, *, skip: bool) -> OutputPart:
        """Print the next piece of output; return its reply."""
        while True:
            where = {"offset": self.offset, "attempt": self.attempt, "wait_seconds": wait_seconds}
            try:
                part = read_as(OutputPart, await self._client.call(self._message | where))
            except NotFound as error:
                attempts = read_as(list[StartNumber], error.details.get("attempts") or [])
                later = [attempt for attempt in attempts if attempt > self.attempt]
                if not (skip and later):
                    raise
                note(f"there is no output of attempt {self.attempt}")
                self.attempt, self.offset = min(later), 0
            else:
                self._write(_decode(part.base64 or ""))
                return part

    def _go_on(self, part: OutputPart) -> None:
        """Store the offset of the next piece."""
        if (part.attempt, part.offset) <= (self.attempt, self.offset) and part.base64:
            raise UnreadableError("the server sent the same piece of output twice")
        if self.attempt and part.attempt > self.attempt:
            note(f"attempt {self.attempt} failed; this is attempt {part.attempt}")
        self.attempt, self.offset = part.attempt, part.offset

    async def _runs(self) -> bool:
        lease = read_as(Lease, await self._client.status(self._lease))
        phase = "" if lease.workload is None else lease.workload.phase
        return lease.state in _STARTS_AGAIN or (lease.state != "ended" and phase not in _OVER)

    async def _lost(self, otherwise: str) -> LeaseLost:
        state = await self._client.status(self._lease)
        return LeaseLost(self._lease, state.get("reason") or otherwise)


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UnreadableError(f"the output is not base64: {text[:100]!r}") from error


def _exit_code(code: int) -> int:
    """Return the exit code with which a shell reports a command's end."""
    return code if code >= 0 else _SIGNALLED - code


def _variables(given: list[str]) -> dict[str, str]:
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name:
            raise typer.BadParameter(
                f"--env {each!r}: expected NAME=VALUE, or NAME of an environment variable"
            )
        variables[name] = value if equals else os.environ.get(name, "")
    return variables


def _stop_on_signals() -> list[signal.Signals]:
    """Let signals cancel this command, so that its lease is released; return these signals.

    Only the first signal cancels the command. A second one often follows, and must not interrupt
    the release that the first one began. A Ctrl-C at least `LEAVE_SECONDS` after the first signal
    exits at once, since the server may not answer; the lease then ends with its TTL.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []
    first_at = 0.0

    def stop(number: signal.Signals) -> None:
        nonlocal first_at
        received.append(number)
        if len(received) == 1:
            first_at = loop.time()
            task.cancel()
        elif number is signal.SIGINT and loop.time() - first_at >= LEAVE_SECONDS:
            note("moorage: exiting before the lease has ended; it ends with its TTL")
            os._exit(_SIGNALLED + number)
        else:
            note(f"moorage: {number.name}: the lease is being released already")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    return received
