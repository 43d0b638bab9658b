"""Makes a control group (cgroup v2) for each process or service, if the system permits it.

A process cannot leave its group, whatever session it opens or variables it sets. So the group has
all processes of a workload, and can kill them at once. With the memory controller, it also limits
the memory of the workload as a whole.

    BASE/moorage-DIGEST/         one workload: its memory.max
                        main/    the command and its child processes
                        exec/    commands that run beside it

The supervisor creates and removes a group, since it outlives the daemon. This module has the
daemon's part: it tests whether groups are possible, puts commands into groups, and ends groups.
"""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError
from moorage.backends.local.marks import kill_until_none

DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""File attributes by which systemd marks a group that it delegates to a service."""
_SWITCH: Final = "cgroup.subtree_control"


@dataclass(frozen=True, slots=True)
class Groups:
    """The parent under which new control groups can be made, if any.

    Args:
        base: The parent of new groups; None: groups are not possible.
        memory: Whether new groups can limit memory.
        detail: The result of the test, in words.
    """

    base: Path | None
    memory: bool
    detail: str

    def of(self, folder: Path) -> str:
        """Return the path of the control group of a folder's workload; empty without groups."""
        digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:24]
        return "" if self.base is None else str(self.base / f"moorage-{digest}")


def find() -> Groups:
    """Find a parent for new control groups, by making a test group in it."""
    tried = []
    for base in _bases():
        trial = base / f"moorage-trial-{uuid.uuid4().hex[:12]}"
        try:
            trial.mkdir()
            try:
                (trial / "exec").mkdir()
                (trial / "exec").rmdir()
                (trial / "cgroup.kill").write_text("1")
                memory = _switch_on(base) and _bounds(trial)
            finally:
                trial.rmdir()
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
            continue
        bounds = "with a limit of its memory" if memory else "without the memory controller"
        return Groups(base, memory, f"each workload gets a group below {base}, {bounds}")
    return Groups(None, memory=False, detail="; ".join(tried) or "no cgroup v2 is mounted here")


def end(group: str) -> None:
    """Kill all processes of a group, and remove the group; a missing group is not an error. Blocks.

    Raises:
        BackendError: Processes are still alive some seconds later, e.g. blocked in the kernel.
    """
    if not group or not Path(group).is_dir():
        return
    clear(group)
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            Path(folder).rmdir()


def clear(group: str) -> None:
    """Kill all processes of a group; see `end`. Blocks."""

    def kill() -> str:
        if "populated 1" not in Path(group, "cgroup.events").read_text():
            return ""
        Path(group, "cgroup.kill").write_text("1")
        return group

    with contextlib.suppress(FileNotFoundError):  # The supervisor has removed it.
        kill_until_none(kill)


@contextlib.contextmanager
def membership(group: str) -> Iterator[int | None]:
    """Yield a descriptor through which a command joins a workload's group; None without a group."""
    try:
        descriptor = os.open(Path(group, "exec", "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def bound(group: str, memory_bytes: int) -> None:
    """Limit the memory of a workload's control group, if the group has a memory controller.

    Raises:
        BackendError: The kernel refuses the limit; the message has the reason.
    """
    limit = Path(group, "memory.max")
    if group and limit.exists():
        try:
            limit.write_text(str(memory_bytes))
        except OSError as error:
            reason = f"mem_limit: the system refuses {memory_bytes >> 20} MiB to its group"
            raise BackendError(f"{reason}: {limit}: {error.strerror}") from error


def _bases() -> Iterator[Path]:
    """Yield possible parents of new groups: the parent of this process's group, then this group.

    A group with a controller for its children may not have processes itself. So to limit memory,
    the daemon must be in a group of its own, beside those of its workloads.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), None)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            root, mount = fields.split()[3:5]
            if own is None or not kind.startswith("cgroup2 "):
                continue
            inside = os.path.relpath(own, root)
            if inside.startswith(".."):
                continue  # The mount shows another part of the tree.
            here = Path(mount, inside)
            if inside != "." and _is_delegated(here.parent):
                yield here.parent
            yield here


def _is_delegated(group: Path) -> bool:
    for name in DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _switch_on(base: Path) -> bool:
    """Switch the memory controller on for children of a group; return whether it is on."""
    with contextlib.suppress(OSError):
        if "memory" not in (base / _SWITCH).read_text().split():
            (base / _SWITCH).write_text("+memory")
        return True
    return False


def _bounds(group: Path) -> bool:
    with contextlib.suppress(OSError):
        (group / "memory.max").write_text(str(1 << 30))
        return True
    return False
