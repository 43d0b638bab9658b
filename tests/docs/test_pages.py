"""Each block of the README and of the pages of the docs runs, in order, as a reader types it."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL_WORDS_MAX = 25
SHOWN = {"toctree", "text"}
"""Languages of blocks that the tests do not run."""
ELSEWHERE = {
    "how-to/kubernetes.md": "tests/kubernetes/test_how_to.py",
    "how-to/ray.md": "tests/end_to_end/test_ray_how_to.py",
}
"""Pages that need more than a server, each with the test that runs it."""
TEXTS_ELSEWHERE = dict.fromkeys(
    (
        "how-to/back-up-and-restore.md",
        "how-to/install.md",
        "how-to/keep-everything-in-postgresql.md",
        "how-to/recover-a-damaged-disk.md",
        "how-to/replace-a-machine.md",
        "how-to/rotate-tokens-and-certificates.md",
        "how-to/upgrade.md",
    ),
    "tests/docs/test_day_two.py",
)
"""Pages whose blocks `text` another test runs; their other blocks run here."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return [each for each in BLOCK.findall(page.read_text()) if each[0]]


def typed_pages() -> list[str]:
    """Return the pages that have something to type."""
    names = [page.relative_to(DOCS).as_posix() for page in sorted(DOCS.rglob("*.md"))]
    return [
        name
        for name in names
        if name not in ELSEWHERE and {kind for kind, _ in blocks(DOCS / name)} - SHOWN
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("name", typed_pages())
def test_every_block_of_a_page_runs(name: str, reader, tmp_path: Path) -> None:
    found = blocks(DOCS / name)
    if "javascript" in {kind for kind, _ in found} and shutil.which("node") is None:
        pytest.skip("no Node here: apt-get install nodejs")
    own_fleet = any("put_cluster" in text or "fleet import" in text for _, text in found)
    with reader(tmp_path, lab=not own_fleet) as story:
        for language, text in found:
            if language not in SHOWN:
                story.play(language, text)


@pytest.mark.heavy
def test_the_quick_starts_of_the_readme_run_twice(reader, tmp_path: Path) -> None:
    found = blocks(ROOT / "README.md")
    assert {"python", "console"} <= {language for language, _ in found}
    with reader(tmp_path, "--here") as story:
        for language, text in found * 2:
            story.play(language, text)


@pytest.mark.parametrize(("name", "test"), [*ELSEWHERE.items(), *TEXTS_ELSEWHERE.items()])
def test_each_page_that_is_marked_as_tested_elsewhere_has_its_test(name: str, test: str) -> None:
    assert name.rpartition("/")[2] in (ROOT / test).read_text()


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("clients/*/README.md")]
    return sorted([*found, *DOCS.rglob("*.md")])


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_cell_of_a_table_is_a_paragraph(page: Path) -> None:
    rows = re.findall(r"^\|(.+)\|$", re.sub(BLOCK, "", page.read_text()), re.MULTILINE)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > CELL_WORDS_MAX] == []


def tasks() -> list[str]:
    how_to = DOCS / "how-to"
    return sorted(
        each.name for each in how_to.glob("*.md") if each.stem not in {"index", "operate"}
    )


@pytest.mark.parametrize("name", tasks())
def test_each_how_to_page_lists_possible_failures(name: str) -> None:
    text = (DOCS / "how-to" / name).read_text()
    assert "\n## What can go wrong\n" in text
    title, purpose = text.split("\n\n")[:2]
    assert title.startswith("# ")
    assert purpose[0] not in "#`|-", "the first paragraph gives the page's purpose"


def test_a_reply_that_lacks_a_field_of_the_page_is_found(alike) -> None:
    reply = {"success": True, "lease": {"id": "a", "placement": [{"gpus": ["0"]}]}, "more": 1}
    assert alike(reply, {"lease": {"placement": [{"gpus": ["7"]}]}}) == []
    assert alike(reply, {"lease": {"token": ""}}) == [".lease.token"]
    assert alike(reply, {"lease": {"placement": [{"gpus": 1}]}}) == [".lease.placement[].gpus"]
