"""The reference has every name of the code that users meet."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import reference
import typer

from moorage.config.settings import (
    CONFIG_FILE,
    EXECUTION_NAMES,
    EXTERNAL_SERVICES,
    OTHER_NAMES,
    settings,
)
from moorage.model import Code
from moorage.protocol.codes import CLOSE_CODES
from moorage.protocol.messages import OPERATIONS, AllocationRequest
from moorage.records.requests import LeaseRequest, Resources
from moorage.testing.daemon_process import daemon
from moorage_client.cli.exits import MEANINGS

DOCS = reference.DOCS


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Return every page as it is built, by its path."""
    return {
        page.relative_to(DOCS).as_posix(): reference.expand(page.read_text())
        for page in DOCS.rglob("*.md")
    }


@pytest.fixture(scope="module")
def text(pages) -> str:
    return "\n".join(pages.values())


def commands(app: typer.Typer, prefix: str) -> Iterator[str]:
    """Yield every command that an app offers, with its groups: `moorage policy push`."""

    def walk(command: Any, name: str) -> Iterator[str]:
        children = getattr(command, "commands", {})
        for each, child in children.items():
            yield from walk(child, f"{name} {each}")
        if not children:
            yield name

    return walk(typer.main.get_command(app), prefix)


def command_names(app_module: str, prefix: str) -> list[str]:
    module = __import__(app_module, fromlist=["app"])
    return list(commands(module.app, prefix))


@pytest.mark.parametrize(
    ("module", "program"),
    [("moorage.commands.program", "moored"), ("moorage_client.cli.program", "moorage")],
)
def test_every_command_is_in_the_reference(pages, module: str, program: str) -> None:
    found = command_names(module, program)
    assert found
    assert [each for each in found if f"`{each}`" not in pages["reference/command-line.md"]] == []


def test_every_command_on_a_page_exists(text: str) -> None:
    """Each command on a page works as typed."""
    known = command_names("moorage.commands.program", "moored") + command_names(
        "moorage_client.cli.program", "moorage"
    )
    words = {" ".join(each.split()[:2]) for each in known}
    every = text + (reference.ROOT / "README.md").read_text()
    typed = set(re.findall(r"(?:`|^\$ )((?:moored|moorage) [a-z]+)", every, re.MULTILINE))
    assert typed
    assert typed <= words


def test_every_message_and_field_is_in_the_reference(pages) -> None:
    page = pages["reference/messages.md"]
    assert [name for name in OPERATIONS if f"## {name}\n" not in page] == []
    parts = (AllocationRequest, Resources, LeaseRequest)
    fields = {name for part in parts for name in part.__struct_fields__}
    assert [name for name in fields if f"| `{name}` |" not in page] == []


def test_every_operation_and_field_is_explained(pages) -> None:
    """Besides the types, a page explains the purpose of each message."""
    page = pages["how-to/ask-for-gpus.md"] + pages["how-to/start-workloads.md"]
    parts = (AllocationRequest, Resources, LeaseRequest)
    fields = {name for part in parts for name in part.__struct_fields__}
    unsaid = {name for name in {*OPERATIONS, *fields} if f"`{name}`" not in page}
    assert unsaid <= NOT_OFFERED


NOT_OFFERED = {"stream"}
"""Names that the server answers with `unsupported`, or does not support yet."""


def test_every_code_and_setting_is_in_the_reference(pages) -> None:
    codes = pages["reference/codes.md"]
    assert [code for code in Code if f"| `{code}` |" not in codes] == []
    every = {**CLOSE_CODES, **MEANINGS}
    assert [
        code for code, about in every.items() if f"| {int(code)} | {about} |" not in codes
    ] == []
    page = pages["reference/settings.md"]
    assert [name for name in settings() if f"| `{name}`" not in page] == []


@pytest.mark.parametrize(
    "name", sorted({*EXTERNAL_SERVICES, *EXECUTION_NAMES, *OTHER_NAMES, CONFIG_FILE})
)
def test_every_variable_beside_the_settings_is_in_the_reference(text: str, name: str) -> None:
    assert f"`{name}`" in text


def test_every_metric_and_path_of_a_server_is_in_the_reference(pages) -> None:
    options = {"MOORAGE_PROMETHEUS_URL": "http://127.0.0.1:9"}
    with daemon(environment=options) as running:
        metrics = httpx.get(f"{running.http}/metrics").text
        paths = httpx.get(f"{running.http}/openapi.json").json()["paths"]
    names = set(re.findall(r"^# TYPE (\w+?)(?:_created|_total)? ", metrics, re.MULTILINE))
    page = pages["reference/metrics.md"]
    assert names
    assert [name for name in names if f"`{name}" not in page] == []
    assert "|  |" not in page
    page = pages["reference/http.md"]
    operations = [f"{method.upper()} {path}" for path, kinds in paths.items() for method in kinds]
    assert [each for each in operations if f"### {each}\n" not in page] == []


def test_each_marker_of_generated_text_is_known_and_replaced(pages) -> None:
    assert [name for name, page in pages.items() if "<!-- generated" in page] == []


@pytest.mark.parametrize(
    ("name", "link", "expected"),
    [
        (
            "how-to/a.md",
            "[x](../reference/codes.md#exit-codes)",
            "[x](../reference/codes.md#exit-codes)",
        ),
        (
            "how-to/a.md",
            "[x](../../server/moorage/query/README.md)",
            "[x](../reference/query-language.md)",
        ),
        ("how-to/a.md", "[x](../../deploy/compose.yaml)", "x"),
        (
            "reference/shipped-policies.md",
            "![p](../../docs/pictures/churn.svg)",
            "![p](../pictures/churn.svg)",
        ),
        ("how-to/a.md", "[x](https://example.org/a.md)", "[x](https://example.org/a.md)"),
    ],
)
def test_links_of_a_source_page_become_links_of_the_docs(
    name: str, link: str, expected: str
) -> None:
    assert reference.relink(link, name) == expected
