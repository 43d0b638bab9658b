"""The README is short, and each link in it and in the docs leads to a file."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINES_MAX = 150
CHARACTERS_MAX = 9_000
EXAMPLE_LINES_MAX = 10


def test_the_readme_takes_a_minute_to_read() -> None:
    assert len(README.splitlines()) <= LINES_MAX
    assert len(README) <= CHARACTERS_MAX


def test_each_new_terminal_activates_the_environment() -> None:
    blocks = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    first = next(each for each in blocks if "moored serve" in each)
    second = next(each for each in blocks if "moorage fleet" in each)
    tutorials = "".join(page.read_text() for page in (ROOT / "docs" / "tutorials").glob("*.md"))
    servers = re.findall(r"^```console\n((?:\$.*\n)*?\$ moored serve)", tutorials, re.MULTILINE)
    assert len(servers) == tutorials.count("$ moored serve")
    for block in (first, second, *servers):
        assert block.startswith("$ . .venv/bin/activate\n")


def test_no_block_of_a_page_has_a_command_after_moored_serve() -> None:
    """`moored serve` runs until Ctrl-C, so commands after it in its block would never run."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            _, _, after = block.partition("moored serve")
            assert "\n$ " not in after, f"{page}: {block}"


def test_pages_install_from_a_checkout_until_there_is_a_release() -> None:
    """No package index has `moorage` yet, so pages must not install it from an index."""
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*/moorage*/**/*.md"),
    ]:
        assert not re.findall(r"pip install '?moorage.*", page.read_text()), page
    assert "moorage.dev" not in (ROOT / "pyproject.toml").read_text()


def test_tutorials_need_no_more_than_make_demo_installs() -> None:
    """A first hour needs no extra; a tutorial may only name the extra that draws pictures."""
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):
        typed = re.findall(r"^\$ .*", page.read_text(), re.MULTILINE)
        assert [each for each in typed if "--plot" in each] == [], page


def test_quick_starts_have_ten_lines_at_most() -> None:
    blocks = re.findall(
        r"^```(?:python|console|json)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 3
    assert all(len(each.splitlines()) <= EXAMPLE_LINES_MAX for each in blocks)


def test_make_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)`?$", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_that_pages_link_to_exist() -> None:
    """Sphinx checks links between pages of the docs; this test checks those of all other pages."""
    tops = ("docs", "server", "policies", "clients", "deploy", "examples")
    pages = [*ROOT.glob("*.md"), *(page for top in tops for page in (ROOT / top).rglob("*.md"))]
    for page in pages:
        if "node_modules" in page.parts:
            continue
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"
