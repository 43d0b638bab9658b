"""The console ships unaltered vendored files and small scripts, and loads no foreign content."""

import hashlib
import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "server" / "moorage" / "console" / "static"
VENDORED = STATIC / "vendored"
INDEX = STATIC / "index.html"
BYTES_MAX = 220_000
SCRIPTS = sorted([*STATIC.rglob("*.js"), *STATIC.rglob("*.mjs")])
OWN = [path for path in SCRIPTS if VENDORED not in path.parents]


def vendored_rows() -> dict[str, tuple[str, str, str, str]]:
    """Return the rows of VENDORED.md, by file: package, version, licence, checksum."""
    rows = re.findall(r"^\| (.+?) \|$", (VENDORED / "VENDORED.md").read_text(), re.MULTILINE)
    cells = [row.split(" | ") for row in rows][1:]
    return {
        name: (package, version, licence, sum_) for name, package, version, licence, sum_ in cells
    }


def test_vendored_files_agree_with_their_list() -> None:
    assert set(vendored_rows()) == {path.name for path in VENDORED.glob("*.mjs")}
    for name, (package, version, licence, sum_) in vendored_rows().items():
        assert package, name
        assert re.fullmatch(r"\d+\.\d+\.\d+", version), name
        kind, _, text = licence.partition(", ")
        assert kind in {"MIT", "Apache-2.0"}, name
        assert (VENDORED / text).is_file(), name
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == sum_, name


def test_the_page_preloads_all_scripts() -> None:
    """Without preloading, scripts that import each other would need one round trip each."""
    named = re.findall(r'rel="modulepreload" href="/console/static/(.+?)"', INDEX.read_text())
    files = {str(path.relative_to(STATIC)) for path in SCRIPTS}
    assert sorted([*named, "main.js"]) == sorted(files)


def test_scripts_are_small() -> None:
    assert sum(path.stat().st_size for path in SCRIPTS) < BYTES_MAX


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_scripts_import_existing_files(path: Path) -> None:
    text, index = path.read_text(), INDEX.read_text()
    for name in re.findall(r'^import .* from "(.+?)";', text, re.MULTILINE):
        if name.startswith("."):
            assert (path.parent / name).resolve().is_file(), name
        else:
            assert f'"{name}": "/console/static/vendored/' in index, name
    assert len(text.splitlines()) <= 500


@pytest.mark.parametrize("path", sorted(STATIC.rglob("*.*")), ids=lambda path: path.name)
def test_the_page_loads_nothing_from_other_servers(path: Path) -> None:
    """The page works without internet: no script, style, font or picture of another server."""
    text = path.read_text()
    if VENDORED not in path.parents:
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}
