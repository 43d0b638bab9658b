"""The commands about policies: push, list, show."""

import base64
import io
import tarfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from moorage_client.cli.asking import json_object
from moorage_client.cli.output import moment, print_json, say, table
from moorage_client.cli.session import Session

ARCHIVE_TYPES: Final = (".zip", ".tar.gz", ".tar.xz")
"""Suffixes of archives that the server reads (allocation-server.md, 3.5)."""

FILES_MAX: Final = 256
"""Files of a policy's directory; more is refused before anything is read."""

ENTRY: Final = "function.py"


def push(
    session: Session,
    path: Annotated[
        Path, typer.Argument(help=f"{ENTRY}, a directory with code/{ENTRY}, or an archive of one")
    ],
    uri: Annotated[str | None, typer.Option(help="Register it as name:version-tag")] = None,
    name: Annotated[str | None, typer.Option(help="… or its name")] = None,
    version: Annotated[str | None, typer.Option(help="… and its version")] = None,
    tag: Annotated[str | None, typer.Option(help="… and its release tag")] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Default parameters: JSON, @file or @-")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="Default settings: JSON, @file or @-")
    ] = None,
    description: Annotated[str, typer.Option(help="What it does, in a sentence")] = "",
) -> None:
    """Register a policy and print its URI."""
    name, version, tag = _identity(path, uri, name, version, tag)
    document = {
        "name": name,
        "version": version,
        "release_tag": tag,
        "policy_rule_uri": f"{name}:{version}-{tag}",
        "type": "python_class_v1",
        "description": description,
        "metadata": {},
        "tags": "",
        "policy_parameters": json_object(parameters, "--parameters") or {},
        "policy_settings": json_object(settings, "--settings") or {},
        **_code(path),
    }
    with session.services() as services:
        registered = services.publish_policy(document)
    if session.json:
        print_json({"policy_rule_uri": registered})
    else:
        say(registered)


def list_policies(session: Session) -> None:
    """List the registered policies."""
    with session.services() as services:
        found: list[dict[str, Any]] = services.policies()
    if session.json:
        print_json(found)
        return
    table(
        ("policy", "description"),
        ((policy.get("policy_rule_uri", ""), policy.get("description", "")) for policy in found),
        empty="No policies. Register one: moorage policy push my_rule.py --uri my-rule:1-stable",
    )


def show(
    session: Session,
    uri: Annotated[str, typer.Argument(help="URI of the policy")],
    history: Annotated[bool, typer.Option("--history", help="Who changed it, and when")] = False,
) -> None:
    """Show the document of a policy, its code included; or its history."""
    with session.services() as services:
        if not history:
            print_json(services.policy(uri))
            return
        changes: list[dict[str, Any]] = services.policy_history(uri)
    if session.json:
        print_json(changes)
        return
    table(
        ("when", "who", "what", "fields", "digest"),
        (
            (
                moment(each["at"]),
                each["who"],
                each["what"],
                " ".join(each.get("fields", ())),
                each["digest"][:12],
            )
            for each in changes
        ),
        empty="Nobody changed it.",
    )


def _identity(
    path: Path, uri: str | None, name: str | None, version: str | None, tag: str | None
) -> tuple[str, str, str]:
    """Return name, version and release tag, however they were given."""
    if uri is not None:
        if name or version or tag:
            raise typer.BadParameter("give --uri, or --name, --version and --tag, not both")
        name, _, rest = uri.partition(":")
        version, _, tag = rest.partition("-")
    if name and version and tag:
        return name, version, tag
    stem = path.name.split(".")[0].replace("_", "-")
    raise typer.BadParameter(
        f"a policy needs a name, a version and a release tag; for example --uri {stem}:1-stable"
    )


def _code(path: Path) -> dict[str, str]:
    """Return the fields of the document that carry the policy's code."""
    try:
        if path.is_dir():
            return _directory(path)
        if path.name.endswith(ARCHIVE_TYPES):
            suffix = next(kind for kind in ARCHIVE_TYPES if path.name.endswith(kind))
            return _archive(path.read_bytes(), suffix)
        return {"code": path.read_text(encoding="utf-8"), "code_type": "source"}
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        kinds = ", ".join(ARCHIVE_TYPES)
        raise typer.BadParameter(f"{path} is neither Python source nor {kinds}") from error


def _directory(path: Path) -> dict[str, str]:
    root = path / "code" if (path / "code").is_dir() else path
    if not (root / ENTRY).is_file():
        raise typer.BadParameter(f"{path} has no code/{ENTRY} and no {ENTRY}")
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.is_symlink()
    )
    if len(files) > FILES_MAX:
        raise typer.BadParameter(f"{path} has {len(files)} files; at most {FILES_MAX} may be")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in files:
            archive.add(file, arcname=f"code/{file.relative_to(root)}", recursive=False)
    return _archive(packed.getvalue(), ".tar.gz")


def _archive(content: bytes, suffix: str) -> dict[str, str]:
    return {
        "code": base64.b64encode(content).decode(),
        "code_type": suffix.removeprefix("."),
    }
