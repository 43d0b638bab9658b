"""Limits of CPU and memory that control groups set for a process: cgroup v1, v2 or both.

`this_machine` uses the limits as the sizes of a node, `moored doctor` shows their files. The limits
of the process's own group and of all its parents count, since a parent's limit may be lower.

Sources: cgroups(7); https://docs.kernel.org/admin-guide/cgroup-v2.html ("cpu.max", "memory.max");
https://docs.kernel.org/scheduler/sched-bwc.html (v1). `cpuset` is not read here: the kernel already
counts only the processors of the `cpuset`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_SELF: Final = Path("/proc/self")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, order=True)
class GroupLimit:
    """A limit of CPU or memory that a control group sets.

    Args:
        amount: Thousandths of a core, or bytes.
        file: The file that has the limit.
    """

    amount: int
    file: Path


def cpu_limit(process: Path = _SELF) -> GroupLimit | None:
    """Return the smallest CPU limit, in thousandths of a core; None if no group sets a limit."""
    found = []
    for folder in _folders(process, "cpu"):
        new, old = folder / "cpu.max", folder / "cpu.cfs_quota_us"
        period_of_old = _words(folder / "cpu.cfs_period_us")[0]
        for file, quota, period in ((new, *_words(new)), (old, _words(old)[0], period_of_old)):
            if quota.isdecimal() and period.isdecimal() and int(period):
                found.append(GroupLimit(max(1, int(quota) * 1000 // int(period)), file))
    return min(found, default=None)


def memory_limit(process: Path = _SELF) -> GroupLimit | None:
    """Return the smallest limit of memory, in bytes; None if no group sets a limit."""
    found = []
    for folder in _folders(process, "memory"):
        for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
            amount, _ = _words(file)
            if amount.isdecimal():  # Without a limit, v1 has a number larger than any memory.
                found.append(GroupLimit(int(amount), file))
    return min(found, default=None)


def _folders(process: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of a process's control groups, from its own group up to the root."""
    paths = _paths(process)
    for root, point, kind, controllers in _mounts(process):
        if kind == "cgroup" and controller not in controllers:
            continue
        path = paths.get(controller if kind == "cgroup" else "")
        if path is None:
            continue
        # A container may see only its own group, which is mounted as the root.
        within = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        folder = point.joinpath(*(part for part in within.parts if part not in {"/", ".."}))
        yield folder
        while folder != point:
            folder = folder.parent
            yield folder


def _paths(process: Path) -> dict[str, PurePosixPath]:
    """Return the process's group by controller of cgroup v1; by the empty name, the group of v2."""
    found: dict[str, PurePosixPath] = {}
    for line in _lines(process / "cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        found |= dict.fromkeys(controllers.split(","), PurePosixPath(path or "/"))
    return found


def _mounts(process: Path) -> Iterator[tuple[PurePosixPath, Path, str, frozenset[str]]]:
    """Yield root, mount point, kind and options of each mounted hierarchy."""
    for line in _lines(process / "mountinfo"):
        mount, _, rest = line.partition(" - ")
        kind, options = rest.split(" ")[0], rest.split(" ")[-1]
        if kind in {"cgroup", "cgroup2"}:
            root, point = (_unescape(each) for each in mount.split(" ")[3:5])
            yield PurePosixPath(root), Path(point), kind, frozenset(options.split(","))


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def _words(file: Path) -> tuple[str, str]:
    """Return the first two words of a file; empty texts if they are missing."""
    first = next(iter(_lines(file)), "").split()
    return (*first, "", "")[0], (*first, "", "")[1]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # No such file: there is no limit, or the other version of control groups.
        return []
