"""Prints the commands' output: one JSON document, or tables and sentences for people.

Results go to stdout, everything else to stderr. Text from the server is shown without control
characters: a policy's text must not control a user's terminal.
"""

import codecs
import errno
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from moorage.model import Code, Placement
from moorage.records.fields import field_title
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage_client.answers import UnreadableError, read_as
from moorage_client.cli.exits import TokenMissing
from moorage_client.cli.sentences import detail, says, sentence
from moorage_client.endpoint import CA_PARAMETER, HTTP_URL_DEFAULT, URL_DEFAULT, Endpoint
from moorage_client.errors import (
    AddressesFailed,
    CertificateRefused,
    ConnectionFailed,
    LeaseLost,
    MoorageError,
    ProtocolViolated,
    ProxyFailed,
    RequestRefused,
    SettingRefused,
    Timeout,
)
from moorage_client.home import HomeMissing
from moorage_client.sign_in import IssuerSilent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_TIMES: Final = frozenset({"granted_at", "expires_at", "since", "deadline", "at", "retry_at"})
"""Fields with seconds since the epoch, which are shown as local time."""

_LEVELS: Final = 8
"""Nesting depth down to which times and empty values in a server's values are found."""

SHORT_CHARS: Final = 12
"""Shown characters of a node's hash; `fleet cordon` accepts them as a name."""
_HASH: Final = re.compile(r"[0-9a-f]{40,64}")
_RESOURCES: Final = re.compile(r"; field: (resources|policy_rule_uri)(?![\w.])")
"""Matches, in an error's message, a field that an option of the command line sets."""
_DETAILS: Final = ("fits_if", "largest", "misfits", "binding")
"""Fields of a refusal that contain sentences and never JSON."""
_CHANGE: Final = frozenset({"field", "asked", "fits"})
"""Fields of a change that would make a request fit."""

_FAR_SECONDS: Final = 1e12
"""Largest number that is shown as a time, some thirty thousand years from now."""

_SCRAPER: Final = "with the role metrics"
"""Part of the server's refusal of a token that may only read `/metrics`."""
_MISSING: Final[Mapping[str, str]] = {
    Code.UNKNOWN_POLICY: (
        "Register a policy with `moorage policy push FILE`, or a shipped one, such as `moorage "
        "policy push best_fit`; `moorage policy list` lists the registered ones."
    ),
    Code.UNKNOWN_CLUSTERS: (
        "Register machines with `moorage fleet import SOURCE`, or start the server with --here to "
        "use its machine; `moorage fleet` lists the clusters."
    ),
}
"""Advice by error code, for a name that does not exist and resembles no existing name."""

_PIPE_COLUMNS: Final = 160
"""Width of tables in a pipe, whose reader's width is unknown."""


class OutputFormat(StrEnum):
    """The choices of `-o`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


as_yaml: ContextVar[bool] = ContextVar("as_yaml", default=False)
"""Whether the current command prints documents as YAML, by `-o yaml`."""

_STATES: Final = {
    "granted": "green",
    "active": "green",
    "starting": "cyan",
    "queued": "cyan",
    "warm": "yellow",
    "ending": "yellow",
    "failing": "red",
    "ended": "dim",
}
"""Colours of states; not used in files, in pipes, and with NO_COLOR."""


class _Finding(Struct):
    """A fault of a policy's code."""

    message: str = ""
    file: str | None = ""
    line: int | None = None
    text: str | None = ""


def print_json(document: JsonValue) -> None:
    """Print one JSON document on stdout, or a YAML document with `-o yaml`.

    Raises:
        UnreadableError: The document is nested too deep.
    """
    if not as_yaml.get():
        sys.stdout.write(_json(document, indent=2) + "\n")
        return
    import yaml  # noqa: PLC0415  # Slow to import, and seldom needed.

    try:
        yaml.safe_dump(document, sys.stdout, sort_keys=False, allow_unicode=True)
    except RecursionError as error:
        raise UnreadableError("an answer is nested too deep to be shown") from error


def to_line(document: JsonValue) -> str:
    """Return a document as JSON in one line; raise `UnreadableError` if it is nested too deep."""
    return _json(document, ensure_ascii=False)


def _json(document: JsonValue, **style: Any) -> str:
    try:
        return json.dumps(document, **style)
    except RecursionError as error:
        raise UnreadableError("an answer is nested too deep to be shown") from error


def say(text: str) -> None:
    """Print a result for people on stdout."""
    sys.stdout.write(plain(text) + "\n")


def note(text: str) -> None:
    """Print a remark on stderr, apart from the result."""
    sys.stderr.write(plain(text) + "\n")


def plain(text: str) -> str:
    """Return text without control characters, except line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


class Passed:
    """Writes a workload's output: unchanged to a file or pipe, made harmless on a terminal.

    On a terminal, control characters other than line ends and tabs are shown as `�`, as `ls` and
    `journalctl` do. Otherwise a workload's output, perhaps a stranger's, could set the terminal's
    title, send input in the user's name, or hide lines.
    """

    def __init__(self) -> None:
        text = codecs.getincrementaldecoder("utf-8")("replace")
        tamed = io.IncrementalNewlineDecoder(text, translate=True)
        self._decoder = tamed if sys.stdout.isatty() else None

    def write(self, data: bytes) -> None:
        """Write the next piece of output."""
        if self._decoder is None:
            write_bytes(data)
        else:
            self._tell(self._decoder.decode(data))

    def end(self) -> None:
        """End an incomplete last line."""
        if self._decoder is not None:
            self._tell(self._decoder.decode(b"", final=True))

    def _tell(self, text: str) -> None:
        sys.stdout.write(plain(text))
        sys.stdout.flush()


def write_bytes(data: bytes) -> None:
    """Write bytes to stdout unchanged."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """Print a table, or the sentence `empty` if there are no rows.

    Args:
        columns: Headings. A heading with a final `>` aligns its column to the right; a column whose
            heading has a final `?` is shown only if its cells differ.
        rows: Cells by row.
        empty: The sentence in place of an empty table.
    """
    shown = make_table(columns, rows)
    if shown.rows:
        sys.stdout.write(render(shown))
    else:
        note(empty)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> "Table":
    """Return a `rich` table; the arguments are those of `table`."""
    from rich import box  # noqa: PLC0415  # Slow to import; --json never needs it.
    from rich.table import Table  # noqa: PLC0415  # As above.
    from rich.text import Text  # noqa: PLC0415  # As above.

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    wanted = [
        number
        for number, column in enumerate(columns)
        if not column.endswith("?") or len({row[number] for row in cells}) > 1
    ]
    for column in (columns[number].rstrip("?") for number in wanted):
        right = column.endswith(">")
        shown.add_column(
            column.rstrip(">"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=column in {"lease", "request"},  # Ids are there to be copied.
        )
    for row in cells:
        shown.add_row(*(Text(row[n], _STATES.get(row[n], "")) for n in wanted))
    return shown


def console() -> "Console":
    """Return rich's console on stdout, with the width of the terminal or a default width."""
    from rich.console import Console  # noqa: PLC0415  # As above.

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else _PIPE_COLUMNS, highlight=False)


def render(shown: "RenderableType") -> str:
    """Return a `rich` object as text: if `rich` printed, a closed pipe would end the process."""
    ours = console()
    with ours.capture() as captured:
        ours.print(shown)
    text: str = captured.get()
    return text


def fields(document: JsonMapping) -> None:
    """Print a document as `name: value` lines, without empty values; nested values as JSON."""
    shown = {name: _value(name, value) for name, value in document.items() if name != "lease"}
    width = max(map(len, shown), default=0)
    for name, text in shown.items():
        if text:
            say(f"{name:<{width}}  {text}")


def _value(name: str, value: JsonValue) -> str:
    if name in _TIMES and value == 0:
        return ""  # The event has not happened and is not planned.
    if name in _DETAILS:
        return detail(name, value, in_words)
    shown = without_empty(_with_local_times(name, value, _LEVELS))
    if shown is None:
        return ""
    return shown if isinstance(shown, str) else _json(shown, ensure_ascii=False)


def without_empty(value: JsonValue, levels: int = _LEVELS) -> JsonValue:
    """Return a value without empty texts, lists and objects; None if nothing is left."""
    if levels and isinstance(value, dict):
        parts = {name: without_empty(each, levels - 1) for name, each in value.items()}
        return {name: part for name, part in parts.items() if part is not None} or None
    if levels and isinstance(value, list):
        items = (without_empty(each, levels - 1) for each in value)
        return [item for item in items if item is not None] or None
    return None if value == "" else value


def in_words(value: JsonValue, levels: int = _LEVELS) -> str:
    """Return a detail of a refusal for a person: names with spaces, lists with commas."""
    value = without_empty(value)
    if value is None:
        return ""
    if levels and isinstance(value, dict):
        if value.keys() <= _CHANGE and "field" in value:  # One of `fits_if`.
            named = field_title(str(value["field"]))
            if "fits" not in value:
                return f"without {named}"
            instead = in_words(value.get("asked"), levels - 1)
            said = f"with {named}: {in_words(value['fits'], levels - 1)}"
            return f"{said} instead of {instead}" if instead else said
        parts = (
            f"{field_title(name)} {in_words(each, levels - 1)}" for name, each in value.items()
        )
        return ", ".join(parts)
    if levels and isinstance(value, list):
        changes = all(isinstance(each, dict) and "field" in each for each in value)
        return (", or " if changes else ", ").join(in_words(each, levels - 1) for each in value)
    return value if isinstance(value, str) else _json(value, ensure_ascii=False)


def count_things(number: int | str, what: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1: "1 node", "2 nodes"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _with_local_times(name: str, value: JsonValue, levels: int) -> JsonValue:
    """Return a value of the server with its times in local time."""
    if name in _TIMES and isinstance(value, int | float):
        return local_time(value)
    if levels and isinstance(value, list):
        return [_with_local_times(name, each, levels - 1) for each in value]
    if levels and isinstance(value, dict):
        return {
            key: _with_local_times(key, each, levels - 1)
            for key, each in value.items()
            if not (key in _TIMES and each == 0)
        }
    return value


def where(placement: Placement) -> str:
    """Return a placement as one line: `c0/n1 gpus 0,1`, one part for each node."""
    parts = []
    for share in placement:
        gpus = f" gpus {','.join(share.gpus)}" if share.gpus else ""
        part = f" ({share.gpu_milli} milli)" if share.gpus and share.gpu_milli != 1000 else ""  # noqa: PLR2004  # A whole GPU.
        parts.append(f"{share.cluster_id}/{short_name(share.node_id)}{gpus}{part}")
    return "; ".join(parts)


def short_name(node: str) -> str:
    """Return a node's name for tables; a long hash, such as Ray's node id, is shortened."""
    return node[:SHORT_CHARS] if _HASH.fullmatch(node) else node


def ends_in(expires_at: float) -> str:
    """Return the time until a moment of the server's clock, in words."""
    if expires_at > _FAR_SECONDS:
        return "never"
    seconds = round(expires_at - time.time())
    if seconds <= 0:
        return "now"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def local_time(at: float) -> str:
    """Return a time, in seconds since the epoch, as local time with its zone."""
    try:
        when = datetime.fromtimestamp(at, UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"  # No calendar has this time.
    return when.isoformat(sep=" ", timespec="seconds")


def failure_document(error: MoorageError) -> JsonObject:
    """Return an error in the shape of the protocol's failure reply."""
    if isinstance(error, RequestRefused):
        fields: JsonObject = {**error.details, "code": error.code, "reason": error.reason}
        fields |= {"field": error.field} if error.field else {}
        fields |= {"expected": error.expected} if error.expected else {}
        document = {"success": False, "message": error.reason, "error": fields}
        return document | ({"request": error.request} if error.request else {})
    return failure(_code(error), _message(error))


def failure(code: str, message: str) -> JsonObject:
    """Return a failure that did not come from the server, in the shape of a failure reply."""
    error = {"code": code, "reason": message}
    return {"success": False, "message": message, "error": error}


def explain_failure(error: MoorageError) -> None:
    """Print an error and its remedy for people on stderr."""
    note(f"moorage: {_message(error)}")
    match error:
        case ConnectionFailed():
            _explain_place(error)
        case RequestRefused():
            _explain_details(error)
            if error.code == Code.UNAUTHORIZED and _SCRAPER in error.reason:
                note("A token with the role metrics reads /metrics only.")
            elif error.code == Code.UNAUTHORIZED and error.details.get("verdict") != "not_you":
                note("Say who you are with --token, MOORAGE_TOKEN or `moorage login`.")
            if error.code in _MISSING and "did you mean" not in error.reason.lower():
                note(_MISSING[error.code])
            if error.request:
                note(f"More: moorage why {error.request}")
        case _:  # Other errors need no advice.
            pass


def _message(error: MoorageError) -> str:
    """Return the message of an error, with options of the command in place of client parameters."""
    if isinstance(error, SettingRefused) and error.setting.islower():
        return f"--{error.setting.replace('_', '-')}: {error.expected}"
    text = str(error).replace(CA_PARAMETER, "--ca-file")
    return _RESOURCES.sub("", text)


def _explain_place(error: ConnectionFailed) -> None:
    """Print advice for reaching a server that does not answer."""
    match error:
        case ProtocolViolated(other_port=True) | CertificateRefused() | ProxyFailed():
            pass  # The messages of these errors say what to do.
        case IssuerSilent():
            note("That is the issuer of this server's tokens. Try again, or use --token.")
        case AddressesFailed(url=url):
            option = "--http-url" if url.startswith("http") else "--url"
            note(f"Check the addresses in {option}, and whether servers run there.")
        case ProtocolViolated(url=url):
            option = "--http-url" if url.startswith("http") else "--url"
            note(f"The program at {url} is not a Moorage server of this version; check {option}.")
        case ConnectionFailed(url=url) if url.startswith(("uds:", "tcp:")):
            note("Serve a pool with `moorage pool serve`, or give its address with --address.")
        case ConnectionFailed(url=url):
            http = url.startswith("http")
            option, variable, default = (
                ("--http-url", "MOORAGE_HTTP_URL", HTTP_URL_DEFAULT)
                if http
                else ("--url", "MOORAGE_URL", URL_DEFAULT)
            )
            if Endpoint(url, None).is_here and error.reason == os.strerror(errno.ECONNREFUSED):
                note(f"Start a server with `moored serve --here`, or give its URL with {option}.")
            elif http and error.reason.endswith("without response"):
                note("The WebSocket's port ends connections like this; HTTP has a port of its own.")
            else:
                note(f"Check {option}, and whether the server runs there.")
            note(f"({option} defaults to {variable}, else {default})")


def _explain_details(error: RequestRefused) -> None:
    for name, value in error.details.items():
        if name == "findings":
            _explain_findings(value)
        elif name == "data":  # The policy's own value: print it unchanged.
            note(f"  The policy's answer: {_json(value, ensure_ascii=False)}")
        elif says(name, value, error.reason):
            continue
        elif text := sentence(name, value, in_words):
            note(f"  {text}")


def _explain_findings(findings: JsonValue) -> None:
    """Print the faults of a policy's code, except the first, which the error's message has."""
    for each in read_as(list[_Finding], findings)[1:]:
        line = f", line {each.line}" if each.line else ""
        where = f"{each.file}{line}: " if each.file else ""
        note(f"{where}{each.message}" + (f"\n{each.text}" if each.text else ""))


def _code(error: MoorageError) -> str:
    match error:
        case ProtocolViolated():
            return "protocol_violated"
        case ConnectionFailed():
            return "connection_failed"
        case Timeout():
            return "timeout"
        case LeaseLost():
            return "lease_lost"
        case TokenMissing():
            return "token_missing"
        case HomeMissing() | SettingRefused():
            return "usage"
        case _:  # An error without a code here is a defect.
            return "internal"
