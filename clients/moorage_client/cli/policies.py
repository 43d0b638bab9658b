"""The commands about policies: push, list, show, delete."""

import base64
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import Struct

from moorage.model import Code
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.policies import PolicyHistoryEntry, PolicyOutput
from moorage_client.answers import read_as
from moorage_client.cli import completing
from moorage_client.cli.asking import json_object
from moorage_client.cli.output import local_time, note, print_json, say, table
from moorage_client.cli.server_program import run
from moorage_client.cli.session import CommandSession
from moorage_client.cli.testing import own_names, policy_name, test_first, with_own_names
from moorage_client.errors import RequestRefused
from moorage_client.text_files import decode_source, read_file, read_text

if TYPE_CHECKING:
    from moorage_client.services import Services

ARCHIVE_TYPES: Final = (".zip", ".tar.gz", ".tar.xz")
"""Suffixes of archives that the server accepts."""

FILES_MAX: Final = 256
"""Maximum files in a policy's folder; a larger folder is not read."""

CODE_BYTES_MAX: Final = 8 << 20
"""Maximum bytes of a policy's source or archive, as on a server."""

FILES_BYTES_MAX: Final = 16 << 20
"""Maximum bytes of all files in a policy's folder, as on a server."""

ENTRY: Final = "function.py"

_FILE: Final = re.compile(r"[\w.-]{1,96}\.py")
"""Matches the file names that a server shows in its messages."""

DOCUMENT: Final = "policy.json"
"""File beside `code/` with the fields of the PolicyRule document other than the code."""


class _Listed(Struct):
    """A policy in a list."""

    policy_rule_uri: str = ""
    description: str | None = ""


def push(
    session: CommandSession,
    path: Annotated[
        Path,
        typer.Argument(
            help=f"{ENTRY}, a directory with code/{ENTRY}, an archive of one,"
            " a PolicyRule document (.json), or the name of a shipped policy"
        ),
    ],
    uri: Annotated[str | None, typer.Option(help="Register as name:version-tag")] = None,
    name: Annotated[str | None, typer.Option(help="… or give its name")] = None,
    version: Annotated[str | None, typer.Option(help="… and version")] = None,
    tag: Annotated[str | None, typer.Option(help="… and release tag")] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Default parameters: JSON, @file or @-")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="Default settings: JSON, @file or @-")
    ] = None,
    examples: Annotated[
        Path | None, typer.Option(help="JSON file of examples that the policy must pass first")
    ] = None,
    description: Annotated[str, typer.Option(help="One sentence that describes the policy")] = "",
    test: Annotated[
        bool,
        typer.Option("--test/--no-test", help="Test the policy here first, unless it is shipped"),
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Register even a policy that is not sound")
    ] = False,
) -> None:
    """Test a policy like `policy test`, register it if it is sound, and print its URI."""
    document = document_of(path)
    name, version, tag = _identity(path, document, uri, name, version, tag)
    document |= {
        "name": name,
        "version": version,
        "release_tag": tag,
        "policy_rule_uri": f"{name}:{version}-{tag}",
    }
    given = {
        "policy_parameters": json_object(parameters, "--parameters"),
        "policy_settings": json_object(settings, "--settings"),
        "description": description or None,
    }
    document |= {field: value for field, value in given.items() if value is not None}
    if examples is not None:
        metadata = document.get("metadata") or {}
        document["metadata"] = {**metadata, "examples": read_json(examples)}
    if test and path.exists() and isinstance(document.get("code"), str):
        test_first(path, document, "registered", quiet=session.json, force=force)
    with session.services() as services, own_names(path):
        registered = services.publish_policy(document)
        warnings = [with_own_names(path, each) for each in services.warnings]
    if session.json:
        more = {"warnings": warnings} if warnings else {}
        print_json({"policy_rule_uri": registered, **more})
        return
    for warning in warnings:
        note(f"warning: {warning}")
    say(registered)


def list_policies(session: CommandSession) -> None:
    """List the registered policies."""
    with session.services() as services:
        found: list[JsonObject] = services.policies()
    if session.json:
        print_json(found)
        return
    table(
        ("policy", "description"),
        (
            (policy.policy_rule_uri, policy.description or "")
            for policy in read_as(list[_Listed], found)
        ),
        empty="No policies. Register one: moorage policy push my_rule.py --uri my-rule:1-stable",
    )


def show(
    session: CommandSession,
    uri: Annotated[
        str, typer.Argument(help="URI of the policy", autocompletion=completing.policies)
    ],
    history: Annotated[
        bool, typer.Option("--history", help="Show the policy's changes, with author and time")
    ] = False,
) -> None:
    """Show the document of a policy with its code, or its history."""
    with session.services() as services:
        if not history:
            document = services.policy(uri)
            changed = _changes_of(services, uri)
            print_json(document | ({"changed_by_management": changed} if changed else {}))
            return
        changes: list[JsonObject] = services.policy_history(uri)
    if session.json:
        print_json(changes)
        return
    table(
        ("when", "who", "what", "fields", "digest"),
        (
            (local_time(each.at), each.who, each.what, " ".join(each.fields), each.digest[:12])
            for each in read_as(list[PolicyHistoryEntry], changes)
        ),
        empty="It was never changed.",
    )


def _changes_of(services: "Services", uri: str) -> JsonObject:
    """Return what `management` has changed of a policy; `{}` if the server runs no policies."""
    try:
        return read_as(PolicyOutput, services.policy_logs(uri)).changed or {}
    except RequestRefused as refused:
        if refused.code != Code.NOT_FOUND:
            raise
        return {}


def delete(
    session: CommandSession,
    uri: Annotated[
        str,
        typer.Argument(help="The version, name:version-tag", autocompletion=completing.policies),
    ],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove the fallback version of an alias")
    ] = False,
) -> None:
    """Remove a version. A version to which an alias sends requests cannot be removed.

    An alias's fallback version, the last one that worked well, is removed only with --force.
    """
    with session.services() as services:
        services.delete_policy(uri, force=force)
    session.say({"deleted": uri}, f"{uri} is removed")


def document_of(path: Path) -> JsonObject:
    """Return the PolicyRule document for a path or name alone, without options."""
    if not path.exists() and re.fullmatch(r"[\w-]+", str(path)):
        return run("shipped", {"name": str(path)})
    if path.suffix == ".json":
        document = read_json(path)
        if not isinstance(document, dict):
            raise typer.BadParameter(f"{path} is not a PolicyRule document (a JSON object)")
        if not document.get("code"):
            raise typer.BadParameter(
                f"{path} has no `code`; put the code there, or push the directory with {path} and "
                f"code/{ENTRY}"
            )
        return document
    beside = path / DOCUMENT
    document = read_json(beside) if beside.is_file() else {}
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{beside} is not a PolicyRule document (a JSON object)")
    return {"type": "python_class_v1", **document, **_code(path)}


def read_json(path: Path, before: str = "") -> JsonValue:
    """Return the JSON value in a file.

    Raises:
        typer.BadParameter: The file has no JSON value; `before` begins the message.
    """
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise typer.BadParameter(f"{before}cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(f"{before}{path} is not JSON: {error}") from error


def _identity(
    path: Path,
    document: JsonMapping,
    uri: str | None,
    name: str | None,
    version: str | None,
    tag: str | None,
) -> tuple[str, str, str]:
    """Return name, version and release tag, from the options or else from the document."""
    if uri is not None and (name or version or tag):
        raise typer.BadParameter("give --uri, or --name, --version and --tag, not both")
    if uri is None:
        uri = document.get("policy_rule_uri") or ""
        name, version, tag = (
            given or document.get(field)
            for given, field in ((name, "name"), (version, "version"), (tag, "release_tag"))
        )
    if uri and not (name and version and tag):
        of_uri, _, rest = str(uri).partition(":")
        of_version, _, of_tag = rest.partition("-")
        name, version, tag = name or of_uri, version or of_version, tag or of_tag
    if name and version and tag:
        return name, version, tag
    raise typer.BadParameter(
        "a policy needs a name, a version and a release tag; for example"
        f" --uri {policy_name(path)}:1-stable"
    )


def _code(path: Path) -> dict[str, str]:
    """Return the fields of the document that carry the policy's code."""
    try:
        if path.is_dir():
            return _directory(path)
        if path.name.endswith(ARCHIVE_TYPES):
            suffix = next(kind for kind in ARCHIVE_TYPES if path.name.endswith(kind))
            return _archive(read_file(path, CODE_BYTES_MAX), suffix) | _name_files(_members(path))
        code = decode_source(read_file(path, CODE_BYTES_MAX))
        return {"code": code, "code_type": "source", **_name_files([path.name])}
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        kinds = ", ".join(ARCHIVE_TYPES)
        raise typer.BadParameter(
            f"{path} is neither Python source (UTF-8, or the encoding that it declares) nor {kinds}"
        ) from error


def _members(path: Path) -> list[str]:
    """Return the names in an archive; empty if the server will refuse the archive."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as zipped:
                return zipped.namelist()
        with tarfile.open(path) as tarred:
            return tarred.getnames()
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, EOFError, ValueError):
        return []


def _name_files(files: Iterable[str]) -> dict[str, str]:
    """Return the field `code_file` with the name of the only Python file; `{}` if several exist."""
    names = [name.rpartition("/")[2] for name in files if name.endswith(".py")]
    return {"code_file": names[0]} if len(names) == 1 and _FILE.fullmatch(names[0]) else {}


def _directory(path: Path) -> dict[str, str]:
    root = path / "code" if (path / "code").is_dir() else path
    sources = [each.name for each in root.glob("*.py")]
    if ENTRY not in sources and len(sources) != 1:
        raise typer.BadParameter(
            f"{path} has neither code/{ENTRY} nor {ENTRY}: the file with the class "
            "AIOSv1PolicyRule must have this name"
        )
    for name in ("requirements.txt", "examples.json"):
        if root != path and (path / name).is_file() and not (root / name).exists():
            raise typer.BadParameter(f"{path / name} would not be uploaded; put it into {root}")
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file()
        and "__pycache__" not in file.parts
        and not file.is_symlink()
        and file != path / DOCUMENT
    )
    if len(files) > FILES_MAX:
        raise typer.BadParameter(f"{path} has {len(files)} files; at most {FILES_MAX} are allowed")
    if sum(file.stat().st_size for file in files) > FILES_BYTES_MAX:
        raise typer.BadParameter(f"{path} has more than {FILES_BYTES_MAX} bytes of files")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in files:
            archive.add(file, arcname=f"code/{file.relative_to(root)}", recursive=False)
    return _archive(packed.getvalue(), ".tar.gz") | _name_files(map(str, files))


def _archive(content: bytes, suffix: str) -> dict[str, str]:
    return {"code": base64.b64encode(content).decode(), "code_type": suffix.removeprefix(".")}
