"""Find unmet requirements in a policy's `requirements.txt`, for warnings.

The file is read as pip reads it (PEP 508), and held against what is installed here, which is what
the cells import. Options of pip's are not followed: nothing is ever fetched.
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
"""Lines of `requirements.txt` that are read."""
LINE_CHARS_MAX: Final = 1000
"""Length of one requirement, continued lines included; longer ones are ignored."""

_NAMES: Final = frozenset(canonicalize_name(each.partition(".")[0]) for each in IMPORTABLE)
_MISSING: Final = "is not available to policies, and the server installs nothing for them"


@dataclass(frozen=True, slots=True)
class Unmet:
    """A requirement for a package or version that policies cannot use.

    Args:
        line: Where it begins, from 1.
        text: What stands there, without its comment.
        why: What is wrong with it, to be read after its text.
    """

    line: int
    text: str
    why: str = _MISSING


def unmet(files: Mapping[str, bytes]) -> Iterator[Unmet]:
    """Yield the unmet requirements of a policy.

    Lines beyond `LINES_MAX` are not read.

    Args:
        files: All files of the policy, by path; what lies beside `function.py` is importable too.
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
    """Return why a requirement is unmet; empty if it is met, or is for another Python."""
    if text.startswith(("-", ".", "/")) or "://" in text or len(text) > LINE_CHARS_MAX:
        return _MISSING
    try:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            return ""
    except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName, RecursionError):
        return "is no requirement that pip would take"
    name = canonicalize_name(wanted.name)
    if name not in _NAMES and name not in own:
        return _MISSING
    if not wanted.specifier or name in own:
        return ""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""  # Of the standard library, which has no versions of its own.
    if wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"is not the version that policies get, {wanted.name} {version}"
