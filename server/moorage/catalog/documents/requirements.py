"""Finds unmet requirements in a policy's `requirements.txt`, for warnings.

The file is parsed like pip does (PEP 508), and compared with the packages installed here, which
cells import. Options of pip are ignored, and nothing is downloaded.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from moorage.policy.requirements import IMPORTABLE, REQUIREMENTS

LINES_MAX: Final = 1000
"""Maximum lines of `requirements.txt` that are read."""
LINE_CHARS_MAX: Final = 1000
"""Maximum characters of one requirement, including continued lines; longer ones are ignored."""

_NAMES: Final = frozenset(canonicalize_name(each.partition(".")[0]) for each in IMPORTABLE)
_MISSING: Final = "is not available to policies, and the server installs nothing for them"


@dataclass(frozen=True, slots=True)
class Unmet:
    """A requirement for a package or version that policies cannot use.

    Args:
        line: Number of the requirement's first line, from 1.
        text: The requirement, without its comment.
        why: What is wrong, as the end of a sentence that begins with `text`.
    """

    line: int
    text: str
    why: str = _MISSING


def unmet(files: Mapping[str, bytes]) -> Iterator[Unmet]:
    """Yield the unmet requirements of a policy.

    Lines beyond `LINES_MAX` are not read.

    Args:
        files: All files of the policy, by path; files beside `function.py` are importable.
    """
    own = {canonicalize_name(path.split("/", 1)[0].removesuffix(".py")) for path in files}
    content = files.get(REQUIREMENTS, b"").decode("utf-8-sig", "replace")
    for number, text in _join_lines(content.splitlines()[:LINES_MAX]):
        why = _why_not(text, own)
        if why:
            yield Unmet(number, text, why)


def _join_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield requirements with the numbers of their first lines; a backslash continues a line."""
    begun, joined = 0, ""
    for number, line in enumerate(lines, 1):
        text = "" if line.lstrip().startswith("#") else line.partition(" #")[0].rstrip()
        begun = begun or number
        joined += text.removesuffix("\\")
        if not text.endswith("\\"):
            if joined.strip():
                yield begun, joined.strip()
            begun, joined = 0, ""
    if joined.strip():
        yield begun, joined.strip()


def _why_not(text: str, own: Collection[str]) -> str:
    """Return why a requirement is unmet; "" if it is met, or does not apply to this Python."""
    if text.startswith(("-", ".", "/")) or "://" in text or len(text) > LINE_CHARS_MAX:
        return _MISSING
    try:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            return ""
    except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName, RecursionError):
        return "is not a requirement that pip would take"
    name = canonicalize_name(wanted.name)
    if name not in _NAMES and name not in own:
        return _MISSING
    if not wanted.specifier or name in own:
        return ""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""  # A standard library module: no version.
    if wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"is not the version that policies get, {wanted.name} {version}"
