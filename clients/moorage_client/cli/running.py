"""`moorage run`, `exec` and `logs`: commands on what a lease holds."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from moorage.protocol.fields import ATTEMPTS_MAX
from moorage_client.cli.asking import token_of
from moorage_client.cli.output import note, print_json, where
from moorage_client.cli.session import Session
from moorage_client.cli.tokens import TokenFile, state_path
from moorage_client.errors import LeaseLost, NotFound

DEFAULT_POLICY: Final = "best_fit:1.0-stable"
TTL_SECONDS: Final = 60.0
"""Of the lease of `run`: its GPUs are free this long after this command died."""
FOLLOW_SECONDS: Final = 10.0
"""How long one question for more output waits at the server."""
END_SECONDS_MAX: Final = 30.0
"""How long a lease may take to end after its workload."""
LOOK_SECONDS: Final = 0.1
SPARE_SECONDS: Final = 30.0
"""Beyond what a command may take, for its answer to come."""
REQUEUES_MAX: Final = ATTEMPTS_MAX - 1
"""The first start is none of them."""
_SIGNALLED: Final = 128
"""A shell's exit code for a command that a signal ended is this and the signal's number."""

_Command = Annotated[list[str], typer.Argument(help="The command, after `--`")]
_LeaseToken = Annotated[
    str | None, typer.Option(help="Token of the lease (else as kept by `moorage ask`)")
]


def run(
    session: Session,
    command: _Command,
    gpus: Annotated[int, typer.Option("--gpus", "-g", min=0, help="GPUs")] = 0,
    gpu_milli: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Thousandths of each GPU (else 1000)")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="GPU models, any of them")] = None,
    cpu_milli: Annotated[int | None, typer.Option(min=0, help="Thousandths of a core")] = None,
    memory_mib: Annotated[int | None, typer.Option(min=0, help="Memory in MiB")] = None,
    policy: Annotated[
        str, typer.Option("--policy", "-p", envvar="MOORAGE_POLICY", help="The rule that decides")
    ] = DEFAULT_POLICY,
    cluster: Annotated[list[str] | None, typer.Option(help="Cluster to choose from")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait in the queue")] = 0.0,
    priority: Annotated[int, typer.Option(help="Higher goes first")] = 0,
    image: Annotated[
        str | None, typer.Option(help="Run it in a container of this image (else as a process)")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the command")] = None,
    workdir: Annotated[
        Path | None, typer.Option(help="Where it runs (else here; not for containers)")
    ] = None,
    backend: Annotated[str, typer.Option(help="What starts it")] = "local",
    requeue: Annotated[
        int,
        typer.Option(
            min=0, max=REQUEUES_MAX, help="If it fails, start it elsewhere, so many times"
        ),
    ] = 0,
) -> None:
    """Hold GPUs while a command runs on them; its output and exit code are this one's.

    The command gets no input. What it writes passes through the server as text.
    """
    if image is not None and workdir is not None:
        raise typer.BadParameter(
            "--workdir is for processes; a container runs where its image says"
        )
    spec: dict[str, Any] = {"command": command, "environment": _variables(env or [])}
    if image is not None:
        spec |= {"category": "container", "image": image}
    elif backend == "local":
        spec["workdir"] = str((workdir or Path.cwd()).absolute())
    resources = {
        "gpus": gpus,
        "gpu_milli": gpu_milli,
        "models": model or None,
        "cpu_milli": cpu_milli,
        "memory_mib": memory_mib,
    }
    provision: dict[str, Any] = {"backend": backend, "spec": spec}
    if requeue:
        provision |= {"on_failure": "requeue", "attempts_max": requeue + 1}
    request = {
        "resources": {name: value for name, value in resources.items() if value is not None},
        "clusters": cluster or None,
        "provision": provision,
    }

    terms = {"ttl_seconds": TTL_SECONDS, "wait_seconds": wait, "priority": priority}
    output: list[str] = []
    write = output.append if session.json else _write
    name, code = session.run(lambda client: _hold(client, write, policy, terms | request))
    if session.json:
        print_json({"lease": name, "exit_code": code, "output": "".join(output)})
    raise typer.Exit(_exit_code(code))


async def _hold(
    client: Any, write: Callable[[str], None], policy: str, request: dict[str, Any]
) -> tuple[str, int]:
    """Hold a lease until its workload ends; return the lease's id, and the exit code.

    Raises:
        LeaseLost: It was never started, or its end was not seen.

    """
    _stop_on_signals()
    code: int | None = None
    lease = client.lease(policy, cancel_when_lost=False, **request)
    try:
        async with lease as held:
            note(f"lease {held.id} on {where(held.placement)}")
            code = await _follow(client, held.id, held.token, write)
    except LeaseLost:
        if code is None:
            raise
    assert code is not None
    return held.id, code


def execute(
    session: Session,
    lease: Annotated[str, typer.Argument(help="Id of the lease")],
    command: _Command,
    limit: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds that it may take")
    ] = 60.0,
    workdir: Annotated[str, typer.Option(help="Where it runs")] = "",
    user: Annotated[str, typer.Option(help="As whom, in a container")] = "",
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the command")] = None,
    lease_token: _LeaseToken = None,
) -> None:
    """Run a command inside of the workload of a lease; its exit code is this one's."""
    message = {
        "op": "exec",
        "lease": lease,
        "token": token_of(TokenFile(state_path()), lease, lease_token),
        "command": command,
        "timeout_seconds": limit,
        "workdir": workdir,
        "user": user,
        "environment": _variables(env or []),
    }

    async def work(client: Any) -> dict[str, Any]:
        done: dict[str, Any] = await client.call(message, idempotent=False)
        return done

    done = replace(session, timeout=limit + SPARE_SECONDS).run(work)
    if session.json:
        print_json(done)
    else:
        _write(done["output"])
    raise typer.Exit(_exit_code(done["exit_code"]))


def logs(
    session: Session,
    lease: Annotated[str, typer.Argument(help="Id of the lease")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the workload ends")
    ] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last bytes")] = None,
    lease_token: _LeaseToken = None,
) -> None:
    """Print what the workload of a lease wrote."""
    token = token_of(TokenFile(state_path()), lease, lease_token)

    async def work(client: Any) -> None:
        message: dict[str, Any] = {"op": "logs", "lease": lease, "token": token}
        offset = 0 if tail is None else -tail
        if tail == 0:  # Nothing of what there is: the end is where the last byte is.
            offset = (await client.call(message | {"offset": -1}))["offset"]
        if follow:
            await _follow(client, lease, token, _write, offset)
            return
        message |= {"offset": offset}
        while True:
            part = await client.call(message)
            _write(part["text"])
            if part["over"] or not part["text"]:
                return
            message |= {"offset": part["offset"], "attempt": part["attempt"]}

    session.run(work)


async def _follow(
    client: Any, lease: str, token: str, write: Callable[[str], None], offset: int = 0
) -> int:
    """Pass on what a workload writes until it ends; return its exit code.

    Raises:
        LeaseLost: It was never started, or its end was not seen; the reason says what is known.

    """
    message = {"op": "logs", "lease": lease, "token": token, "wait_seconds": FOLLOW_SECONDS}
    attempt = 0
    while True:
        try:
            part = await client.call(message | {"offset": offset, "attempt": attempt})
        except NotFound as error:
            state = await client.status(lease)
            raise LeaseLost(lease, state.get("reason") or str(error)) from error
        if attempt and part["attempt"] > attempt:
            note(f"attempt {attempt} failed; this is attempt {part['attempt']}")
        write(part["text"])
        offset, attempt = part["offset"], part["attempt"]
        if part["over"]:
            code: int = part["exit_code"]
            if part["exit_code"] is None:  # It never ran, or nobody saw it end.
                state = await client.status(lease)
                raise LeaseLost(lease, state.get("reason") or "it is not known how it ended")
            return code


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _exit_code(code: int) -> int:
    """Return the exit code of a shell for what a command ended with."""
    return code if code >= 0 else _SIGNALLED - code


def _variables(given: list[str]) -> dict[str, str]:
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name:
            raise typer.BadParameter(f"--env {each!r}: expected NAME=VALUE, or NAME as it is here")
        variables[name] = value if equals else os.environ.get(name, "")
    return variables


def _stop_on_signals() -> None:
    """Have SIGTERM and SIGHUP end this command as Ctrl-C does, so that its lease is released."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
