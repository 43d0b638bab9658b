"""Tests of files from editors of other systems: byte order marks, UTF-16, and PEP 263."""

import json
from pathlib import Path

import pytest
import typer

from moorage.catalog.documents import archives, sources
from moorage_client.cli.asking import json_object
from moorage_client.cli.policies import CODE_BYTES_MAX, FILES_BYTES_MAX, document_of
from moorage_client.inventory import InventoryError, collect
from moorage_client.text_files import FILE_BYTES_MAX

SOURCE = "class AIOSv1PolicyRule: name = 'Grüße'\n"
FLEET = {"id": "lab", "nodes": {"nodeData": [{"id": "n1", "vcpus": {"count": 1}, "memory": 1}]}}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_of_any_editor_are_read(tmp_path: Path, encoding: str) -> None:
    written = tmp_path / "policy.json"
    written.write_text(json.dumps({"code": SOURCE, "name": "Grüße"}), encoding=encoding)
    assert document_of(written)["name"] == "Grüße"
    assert json_object(f"@{written}", "--inputs")["code"] == SOURCE
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "function.py").write_text(SOURCE, encoding="utf-8-sig")
    assert document_of(tmp_path)["name"] == "Grüße"  # From the document beside the code.
    (tmp_path / "p.py").write_text(SOURCE, encoding=encoding)
    assert document_of(tmp_path / "p.py")["code"] == SOURCE
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps(FLEET), encoding=encoding)
    assert collect([str(fleet)]).documents[0]["id"] == "lab"


@pytest.mark.parametrize(
    "text",
    [
        f"# -*- coding: latin-1 -*-\n{SOURCE}",
        f"#!/usr/bin/env python3\n# vim: set fileencoding=latin-1 :\n{SOURCE}",
        f"# coding=cp1252\r\n{SOURCE}",
        "# coding: latin-1",
    ],
)
def test_a_source_file_may_name_its_encoding(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.py"
    file.write_bytes(text.encode("latin-1"))
    code = document_of(file)["code"]
    assert code.encode() == text.replace("latin-1", "utf-8").replace("cp1252", "utf-8").encode()
    held: dict[str, object] = {}
    exec(compile(code.encode(), "p.py", "exec"), held)  # noqa: S102  # The server's cells do the same.
    assert "AIOSv1PolicyRule" not in held or held["AIOSv1PolicyRule"].name == "Grüße"  # type: ignore[attr-defined]  # Of the text above.


@pytest.mark.parametrize(
    ("name", "bytes_max"),
    [
        ("p.py", CODE_BYTES_MAX),
        ("p.zip", CODE_BYTES_MAX),
        ("p.json", FILE_BYTES_MAX),
        ("", FILES_BYTES_MAX),
    ],
)
def test_a_file_beyond_the_limit_is_refused_before_it_is_read(
    tmp_path: Path, name: str, bytes_max: int
) -> None:
    file = tmp_path / (name or "function.py")
    with file.open("wb") as large:
        large.truncate(1 << 40)  # No memory holds it.
    with pytest.raises(typer.BadParameter, match=f"has more than {bytes_max} bytes"):
        document_of(tmp_path / name)


def test_endless_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(typer.BadParameter, match="cannot read -: it has more than"):
            json_object("@-", "--inputs")
        with pytest.raises(InventoryError, match="it has more than"):
            collect(["-"], "lab")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.py"
    for content in (SOURCE.encode("latin-1"), b"# coding: x\n", b"\x7fELF\0\xff"):
        file.write_bytes(content)
        with pytest.raises(typer.BadParameter, match=r"neither Python source \(UTF-8, or"):
            document_of(file)


def test_commands_and_server_have_the_same_size_limits_for_policies():
    assert CODE_BYTES_MAX == sources.CODE_BYTES_MAX
    assert FILES_BYTES_MAX == archives.FILES_BYTES_MAX
