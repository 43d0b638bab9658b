"""`make docs` refuses faulty pages, tested with one page for each kind of fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


MISTAKES = {
    "page": ("[nowhere](nowhere.md)", "target not found"),
    "part": ("[no such part](index.md#part)", "local id not found"),
    "level": ("### Third", "Non-consecutive header level"),
    "picture": ("![nothing](nothing.svg)", "not readable"),
    "lost": ("", "isn't included in any toctree"),
}
SOUND = {"page": "[there](index.md), [within](#part)\n\n## Part"}


def build(folder: Path, pages: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    listed = "\n".join(name for name in pages if name != "lost")
    (folder / "index.md").write_text(f"# Index\n\n```{{toctree}}\n{listed}\n```\n")
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(f"# Page\n\n{text}\n")
    makefile = (ROOT / "Makefile").read_text()
    (line,) = [each for each in makefile.splitlines() if "sphinx-build" in each]
    flags = line.split("sphinx-build")[1].split()[:-2]
    command = [Path(sys.executable).with_name("sphinx-build"), *flags, "-c", ROOT / "docs"]
    return subprocess.run(
        [*command, folder, folder / "built"],
        env={**os.environ, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.heavy
def test_each_mistake_in_a_page_fails_the_build_of_the_docs(tmp_path: Path) -> None:
    built = build(tmp_path, {name: text for name, (text, _) in MISTAKES.items()})
    assert built.returncode != 0
    assert [said for _, said in MISTAKES.values() if said not in built.stderr] == []


@pytest.mark.heavy
def test_the_build_of_correct_pages_succeeds(tmp_path: Path) -> None:
    built = build(tmp_path, SOUND)
    assert built.returncode == 0, built.stderr
