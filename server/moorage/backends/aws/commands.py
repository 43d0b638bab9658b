"""Commands on an instance, by the Run Command of AWS Systems Manager (SSM)."""

import math
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from moorage.backends.aws.calls import AwsCalls, AwsError
from moorage.backends.aws.containers import NAME
from moorage.backends.aws.instances import Ec2Instance
from moorage.backends.base import BackendError, CommandExecution, UnsupportedSpecError

LOOK_SECONDS: Final = 0.5
"""Seconds between two checks of a command's status."""
RUN_SECONDS_MAX: Final = 172_800
"""Longest run in seconds that AWS allows a command."""
BEGIN_SECONDS: Final = 60
"""Seconds that AWS may try to deliver a command to its instance."""
CONTAINER_SECONDS_MAX: Final = 300
"""Seconds that a command waits for its container to run."""
_GOES_ON: Final = frozenset({"Pending", "InProgress", "Delayed", "Cancelling"})
_UNMANAGED: Final = "InvalidInstanceId"
_UNKNOWN: Final = "InvocationDoesNotExist"
_NOT_BEGUN: Final = -1


def script_of(
    command: Sequence[str],
    workdir: str | None,
    user: str | None,
    environment: Mapping[str, str],
    *,
    container: bool,
) -> str:
    """Return a command as a script that writes all output to its standard output."""
    if container:
        options = [] if workdir is None else ["--workdir", workdir]
        options += [] if user is None else ["--user", user]
        for key, text in environment.items():
            options += ["--env", f"{key}={text}"]
        runs = f"docker inspect --format '{{{{.State.Running}}}}' {NAME} 2>/dev/null | grep -q true"
        waits = f"n=0; until {runs} || [ $n -ge {CONTAINER_SECONDS_MAX} ]; do"
        inside = shlex.join(["docker", "exec", *options, NAME, *command])
        return f"exec 2>&1\n{waits} n=$((n+1)); sleep 1; done\n{inside}"
    variables = [f"{key}={text}" for key, text in environment.items()]
    words = ["env", *variables, *command] if variables else [*command]
    line = shlex.join(words if user is None else ["runuser", "-u", user, "--", *words])
    return f"exec 2>&1\ncd {shlex.quote(workdir or '/')} || exit\n{line}"


def run(
    calls: AwsCalls,
    instance: Ec2Instance,
    script: str,
    timeout_seconds: float | None,
    given_up: threading.Event,
) -> CommandExecution:
    """Run a script on an instance, and return its outcome after its end. Blocks.

    Raises:
        UnsupportedSpecError: SSM does not manage the instance.
        BackendError: SSM did not run the command.
        TimeoutError: The command took too long, and was ended.
    """
    limit = RUN_SECONDS_MAX if timeout_seconds is None else max(1, math.ceil(timeout_seconds))
    try:
        sent = calls.manage(
            "send_command",
            instance.region,
            InstanceIds=[instance.id],
            DocumentName="AWS-RunShellScript",
            TimeoutSeconds=BEGIN_SECONDS,
            Parameters={"commands": [script], "executionTimeout": [str(limit)]},
        )
    except AwsError as error:
        if error.code != _UNMANAGED:
            raise
        reason = "SSM does not manage it: it needs the SSM agent, which the images by default have"
        role = "an instance_profile whose role has the policy AmazonSSMManagedInstanceCore"
        raise UnsupportedSpecError(
            f"no command can be run on {instance.id}: {reason}, and {role}"
        ) from error
    name = sent["Command"]["CommandId"]
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        done = _read_status(calls, instance, name)
        if done is not None:
            status, code, output = done
            if code == _NOT_BEGUN and status != "Success":
                raise BackendError(f"the command did not run on {instance.id}: SSM says {status}")
            return CommandExecution(code, output)
        late = deadline is not None and time.monotonic() > deadline
        if late or given_up.wait(LOOK_SECONDS):
            calls.manage("cancel_command", instance.region, CommandId=name)
            raise TimeoutError(f"the command ran longer than {timeout_seconds} s")


def _read_status(calls: AwsCalls, instance: Ec2Instance, name: str) -> tuple[str, int, str] | None:
    """Return a command's status at AWS, its exit code and output; None: the command still runs."""
    try:
        seen = calls.manage(
            "get_command_invocation", instance.region, CommandId=name, InstanceId=instance.id
        )
    except AwsError as error:
        if error.code == _UNKNOWN:  # AWS may show a new command later.
            return None
        raise
    if seen["Status"] in _GOES_ON:
        return None
    return seen["Status"], int(seen["ResponseCode"]), seen["StandardOutputContent"]
