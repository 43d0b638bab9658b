"""Generates parts of docs pages: replaces each `<!-- generated: NAME -->` by text from the code.

`docs/conf.py` calls `expand` for every page before Sphinx reads it. The tests that compare the docs
with the code do the same. So no table is written by hand: a new setting, code, message, metric,
command or path of the code is in the docs.
"""

import ast
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import click
import httpx
import typer.main
from typer.cli import get_docs_for_click

from moorage.backends.registry import kinds
from moorage.commands.program import app as moored
from moorage.config.described import settings_markdown
from moorage.daemon.access.rights import RIGHT_OF
from moorage.protocol import specification
from moorage.protocol.codes import CLOSE_CODES, CODES, WORTH_RETRYING
from moorage.protocol.faults import status_of
from moorage.records.rights import Right, Role
from moorage.testing.daemon_process import daemon
from moorage_client.cli.exits import MEANINGS
from moorage_client.cli.program import app as moorage

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
MARKER: Final = re.compile(r"^<!-- generated: (\w+)(?: (\S+))? -->$", re.MULTILINE)
LINK: Final = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?\)")
METRIC: Final = re.compile(r"moorage_[a-z_]+")


def expand(text: str) -> str:
    """Return a page with the generated text in place of every marker."""
    return MARKER.sub(lambda found: PARTS[found[1]](*filter(None, found.groups()[1:])), text)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(each)} |" for each in lines) + "\n"


def codes() -> str:
    """Return the error codes: meaning, HTTP status, and whether a retry may succeed."""
    rows = [
        (f"`{c}`", about, str(status_of(c)), "yes" if c in WORTH_RETRYING else "")
        for c, about in CODES.items()
    ]
    return table(("Code", "Meaning", "HTTP status", "The same request may succeed later"), rows)


def close_codes() -> str:
    """Return the close codes of sockets."""
    return table(("Close code", "Meaning"), [(str(c), about) for c, about in CLOSE_CODES.items()])


def exit_codes() -> str:
    """Return the meanings of the command line's exit codes."""
    rows = [(str(int(each)), meaning) for each, meaning in MEANINGS.items()]
    return table(("Exit code", "Meaning"), rows)


def rights() -> str:
    """Return the rights: their roles, and the messages that need them."""
    rows = []
    for right in Right:
        names = ", ".join(
            f"`{kind.__struct_config__.tag or kind.__name__}`" for kind in needing(right)
        )
        rows.append((right.meaning, names, *("yes" if r in right.roles else "" for r in Role)))
    return table(("May", "Messages", *(role.value for role in Role)), rows)


def needing(right: Right) -> list[Any]:
    """Return the kinds of messages that need a right."""
    return [kind for kind, each in RIGHT_OF.items() if each is right]


def operations() -> str:
    """Return the fields of every message, and of the parts of requests."""
    known = specification.schemas()
    parts = ["Resources", "LeaseRequest", "ProvisionRequest"]
    named = {name: kind.__name__ for name, kind in specification.MESSAGES.items()}
    named |= {f"{each} (part of `allocate`)": each for each in parts}
    return "\n".join(f"## {name}\n\n{fields(known[each])}" for name, each in named.items())


def fields(schema: dict[str, Any]) -> str:
    """Return the purpose of a message, and its fields."""
    required = schema.get("required", [])
    rows = []
    for name, each in schema["properties"].items():
        default = "required" if name in required else f"`{each.get('default', 'none')}`"
        rows.append((f"`{name}`", expectation(each), default.replace("`None`", "none")))
    return schema["description"] + "\n\n" + table(("Field", "Value", "Default"), rows)


def expectation(schema: dict[str, Any]) -> str:
    """Return the allowed values of a field, in words."""
    if "$ref" in schema:
        return f"an object: `{schema['$ref'].rpartition('/')[2]}`"
    if "description" in schema:
        return str(schema["description"]).replace("|", "\\|")
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if "anyOf" in schema:
        parts = [expectation(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(parts)
    return f"{schema.get('type', 'anything')}"


def metrics() -> str:
    """Return the metrics of `/metrics`, with their texts in the sources."""
    found = {}
    for file in sorted((ROOT / "server" / "moorage").rglob("*.py")):
        if "moorage_" in (text := file.read_text(encoding="utf-8")):
            found |= dict(find_metrics(ast.parse(text)))
    return table(("Metric", "What it counts"), [(f"`{n}`", a) for n, a in sorted(found.items())])


def find_metrics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the metrics of a module: calls with a metric's name and its sentence."""
    texts = {  # The sentence of a metric may be a constant.
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            name, about = node.args[:2]
            if isinstance(name, ast.Constant) and METRIC.fullmatch(str(name.value)):
                text = about.value if isinstance(about, ast.Constant) else None
                known = texts.get(about.id) if isinstance(about, ast.Name) else None
                yield str(name.value), str(text or known or "")


def command_line(program: str) -> str:
    """Return the help of every command of a program."""
    command = typer.main.get_command({"moorage": moorage, "moored": moored}[program])
    for each in walk(command):
        each.epilog = None  # The settings have their own page.
    text = get_docs_for_click(obj=command, ctx=click.Context(command), name=program, indent=1)
    return text.replace("\b", "").replace("\n* `--help`: Show this message and exit.", "")


def walk(command: click.Command) -> Iterator[click.Command]:
    """Yield a command and all its subcommands."""
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from walk(each)


@cache
def served_document() -> dict[str, Any]:
    """Return the OpenAPI document that a daemon of this tree serves."""
    with daemon() as running:
        return dict(httpx.get(f"{running.http}/openapi.json", trust_env=False).json())


def paths() -> str:
    """Return every path of HTTP, by subject."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in served_document()["paths"].items():
        for method, each in methods.items():
            told = each.get("description", "").strip()
            text = f"### {method.upper()} {path}\n\n{each['summary']}. {told}\n"
            by_tag.setdefault(each["tags"][0], []).append(text)
    return "\n".join(f"## {tag}\n\n" + "\n".join(each) for tag, each in by_tag.items())


def api(name: str) -> str:
    """Return the public names of a package, as directives for Sphinx."""
    package = importlib.import_module(name)
    found = []
    for each in package.__all__:
        offered = getattr(package, each)
        kind = "class" if inspect.isclass(offered) else "function"
        if inspect.isclass(offered) or inspect.isfunction(offered):
            path = f"{offered.__module__}.{offered.__qualname__}"
            members = "" if kind == "function" else "\n   :members:"
            found.append(f"```{{eval-rst}}\n.. auto{kind}:: {path}{members}\n```\n")
    return f"## {name}\n\n{inspect.getdoc(package)}\n\n" + "\n".join(found)


def page(name: str) -> str:
    """Return a README of the tree as a page of the docs."""
    return (ROOT / name).read_text(encoding="utf-8")


def backend_pages() -> str:
    """Return the entries of a table of contents: the how-to guide of each backend that has one."""
    return "\n".join(name for name in kinds() if (DOCS / "how-to" / f"{name}.md").is_file())


PARTS: Final[dict[str, Callable[..., str]]] = {
    "settings": settings_markdown,
    "codes": codes,
    "close_codes": close_codes,
    "exit_codes": exit_codes,
    "rights": rights,
    "operations": operations,
    "metrics": metrics,
    "command_line": command_line,
    "paths": paths,
    "api": api,
    "page": page,
    "backend_pages": backend_pages,
}


@cache
def pages() -> dict[str, str]:
    """Return the READMEs that are pages of the docs, with these pages."""
    return {
        found[2]: file.relative_to(DOCS).as_posix()
        for file in DOCS.rglob("*.md")
        for found in MARKER.finditer(file.read_text(encoding="utf-8"))
        if found[1] == "page"
    }


def relink(text: str, name: str) -> str:
    """Return a page whose links lead only to pages of the docs.

    Args:
        text: The page, as `expand` made it.
        name: Its path in `docs`.
    """
    here = next((source for source, there in pages().items() if there == name), f"docs/{name}")

    def lead(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(here), found[2]))  # noqa: PTH118, PTH120  # Of text, not of files.
        target = pages().get(target.removesuffix("/") + "/README.md", target)
        target = pages().get(target, target)
        inside = target.removeprefix("docs/")
        if not (DOCS / inside).is_file():  # Sphinx then refuses a link to a missing file.
            return f"]({BLANK})" if (ROOT / target).exists() else found[0]
        start = os.path.dirname(name) or "."  # noqa: PTH120  # As above.
        return f"{found[1]}{os.path.relpath(inside, start)}{found[3] or ''})"

    linked = LINK.sub(lead, text)
    # Other files are named without a link, since the docs may be published without the repository.
    return re.sub(rf"\[([^\]]+)\]\({BLANK}\)", r"\1", linked)


BLANK: Final = "about:blank"
