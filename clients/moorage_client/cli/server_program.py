"""Runs jobs of the server package for the command line: tests of policies, shipped policies.

A client does not import the server's packages: a program of the server package is started with this
interpreter, gets the job as JSON, and prints its outcome as JSON.
"""

import json
import os
import subprocess
import sys
from typing import Final, NoReturn

import typer

from moorage import launch
from moorage.extras import install_command
from moorage.records.json_values import JsonObject
from moorage_client import server_extra

PROGRAM: Final = "moorage.lab.offline"


def check_installation() -> None:
    """Raise `typer.BadParameter` if the server is not installed."""
    if server_extra.missing():
        raise typer.BadParameter(f"first install the server here: {install_command('server')}")


def become_server(program: str, *arguments: str) -> NoReturn:
    """Replace this process by a program of the server package, which then gets the signals."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = launch.command(program, *arguments)
    os.execv(sys.executable, command)  # noqa: S606  # Our own program, and no shell is wanted.


def run(command: str, job: JsonObject) -> JsonObject:
    """Run a job in the server package and return its outcome.

    Raises:
        typer.BadParameter: The job fails: a file is wrong, or this machine has no jail or no
            server package.
    """
    check_installation()
    try:
        packed = json.dumps(job, allow_nan=False).encode()
    except ValueError as error:
        raise typer.BadParameter("NaN and Infinity are not JSON; use a number or null") from error
    with subprocess.Popen(  # noqa: S603  # Our own program.
        launch.command(PROGRAM, command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C reaches only this process, which sends SIGTERM to the child.
    ) as child:
        try:
            written, _ = child.communicate(packed)
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        raise RuntimeError(f"{PROGRAM} ended with {child.returncode}; its last output is above")
    outcome: JsonObject = json.loads(written)
    if "error" in outcome:
        raise typer.BadParameter(outcome["error"])
    return outcome
