"""Each SQL statement of a `.sql` file is used, and stores run no other statements."""

import re
from pathlib import Path

import pytest

import moorage.storage
from moorage.storage.statements import read_statements

FILES = sorted(Path(moorage.storage.__file__).parent.rglob("*.sql"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_statement_of_a_file_is_used(file: Path):
    text = "".join(path.read_text() for path in file.parent.glob("*.py"))
    names = set(re.findall(r"['\"](\w+)['\"]", text))
    assert set(read_statements(file)) - names == set()


def test_a_statement_has_a_name_and_no_semicolon_at_its_end(tmp_path: Path):
    file = tmp_path / "some.sql"
    file.write_text("-- About.\n\n-- name: one\nSELECT 1;\n\n-- name: two\nSELECT\n2\n")
    assert read_statements(file) == {"one": "SELECT 1", "two": "SELECT\n2"}
