"""Each page and section that a source cites exists in the repository."""

import re
from pathlib import Path

import pytest

CITED = re.compile(r'docs/reference/([\w-]+\.md)((?:,?(?: and)?\s+"[^"]+")*)')
# A section number is allowed only for a standard, or for the paper that the line names.
NUMBERED = re.compile(r"§ ?\d|\bsections? \d", re.IGNORECASE)
STANDARD = re.compile(r"RFC ?\d|fileformat2\.html")
ELSEWHERE = re.compile(
    r"(?<!docs/reference/)\b(allocation-server|resource-engine|slot-pool)\.(md|txt)"
)

NAMED = re.compile(r"`([\w./-]+\.py)`")
# Files of policy authors; they are not in the repository.
AUTHORS = {"function.py", "code/function.py"}


def missing(page, names: list[str]) -> list[str]:
    """Return Python files that a page names but that do not exist."""
    below = page.name.rpartition("/")[0]
    there = [f"/{name}" for name in names if name.startswith(below)]
    return [
        f"{page.name}: {named}"
        for named in NAMED.findall(page.text)
        if named not in {*AUTHORS, *names} and not any(x.endswith(f"/{named}") for x in there)
    ]


def dead_citations(files: list, folder: Path) -> list[str]:
    """Return citations of pages or sections that do not exist."""
    pages = {
        page.name: set(re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE))
        for page in folder.glob("*.md")
    }
    return [
        f"{each.name}: {name} {title}".rstrip()
        for each in files
        for name, titles in CITED.findall(each.text)
        for title in ["", *re.findall(r'"([^"]+)"', titles)]
        if name not in pages or (title and " ".join(title.split()) not in pages[name])
    ]


def leading_nowhere(files: list) -> list[str]:
    """Return the lines that cite a page or section by number, or a page without its folder."""
    return [
        f"{each.name}:{number}: {line.strip()}"
        for each in files
        for number, line in enumerate(each.lines, 1)
        if (NUMBERED.search(line) and not STANDARD.search(line)) or ELSEWHERE.search(line)
    ]


def test_every_cited_page_and_section_exists(sources, tests, root) -> None:
    files = [each for each in [*sources, *tests] if each.name != "tests/house/test_citations.py"]
    assert dead_citations(files, root / "docs/reference") == []
    assert sum("docs/reference/" in each.text for each in files) > 10


def test_no_page_or_section_is_cited_by_number(sources) -> None:
    assert leading_nowhere(sources) == []


def test_files_that_pages_name_exist(tree) -> None:
    names = [each.name for each in tree]
    pages = [each for each in tree if each.name.endswith(".md")]
    assert [finding for page in pages for finding in missing(page, names)] == []


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("`host/cell.py` and `cell.py`", False),
        ("`tests/zygote.py`", False),
        ("`function.py` of the policy", False),
        ("`zygote.py`", True),
        ("`ost/cell.py`", True),
    ],
)
def test_missing_citations_are_found(mutant, text: str, lacks: bool) -> None:
    names = ["server/host/cell.py", "tests/zygote.py"]
    assert bool(missing(mutant(text, "server/README.md"), names)) == lacks


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('See docs/reference/sandbox.md, "Design".', 0),
        ('See docs/reference/sandbox.md, "Attack\nclasses" and "Design".', 0),
        ('See docs/reference/sandbox.md, "Design", "Nothing".', 1),
        ("See docs/reference/nothing.md.", 1),
    ],
)
def test_dead_citations_are_found(mutant, root, text: str, count: int) -> None:
    assert len(dead_citations([mutant(text)], root / "docs/reference")) == count


@pytest.mark.parametrize(
    ("line", "nowhere"),
    [
        ("Source: allocation-server.md, the end.", True),
        ("See section 5.3.", True),
        ("As §8.5 has it.", True),
        ("Why a socket was closed (RFC 6455 §7.4).", False),
        ('docs/reference/allocation-server.md, "Services".', False),
    ],
)
def test_dead_links_are_found(mutant, line: str, nowhere: bool) -> None:
    assert bool(leading_nowhere([mutant(line)])) == nowhere
