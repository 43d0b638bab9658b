"""Which folders containers may not mount: the daemon's data, by any name. `Containers` asks."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Mount:
    place: str
    device: str
    root: str


def shows(outside: str, hidden: str) -> bool:
    """Return whether a folder that is mounted would show one that is hidden, or a part of it.

    Links are followed. One folder may be mounted in several places, so the devices and the
    folders there are compared, not the paths. All mounts below count, too.
    """
    mounts = _mounts()
    secret, shown = (
        _lies(os.path.realpath(hidden), mounts),
        _lies(os.path.realpath(outside), mounts),
    )
    below = [each for each in mounts if _leads(os.path.realpath(outside), each.place)]
    return any(_overlap(each, secret) for each in (shown, *below))


def _mounts() -> list[_Mount]:
    """Return all mounts, the latest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        _, _, device, root, place = line.split(" ")[:5]
        found.append(_Mount(_unescape(place), device, _unescape(root)))
    return found[::-1]


def _unescape(text: str) -> str:
    for number in (0o40, 0o11, 0o12, 0o134):  # The kernel writes these in octal, the last one too.
        text = text.replace(f"\\{number:03o}", chr(number))
    return text


def _lies(path: str, mounts: list[_Mount]) -> _Mount:
    """Return the mount of a path, and the path on its device."""
    over = [each for each in mounts if _leads(each.place, path)]
    mount = max(over, key=lambda each: len(each.place))  # The first of these is the latest.
    inside = os.path.relpath(path, mount.place)
    return _Mount(path, mount.device, os.path.normpath(os.path.join(mount.root, inside)))  # noqa: PTH118  # Text of the kernel's.


def _overlap(one: _Mount, other: _Mount) -> bool:
    same = one.device == other.device
    return same and (_leads(one.root, other.root) or _leads(other.root, one.root))


def _leads(folder: str, place: str) -> bool:
    return f"{place}/".startswith(f"{folder.rstrip('/')}/")
