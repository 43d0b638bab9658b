"""Tests of the messages that name the extra to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from moorage.extras import install_command

PROGRAM = "from moorage.extras import install_command; print(install_command('ray'))"


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ('{"url": "file://HERE/m", "dir_info": {"editable": true}}', "-e 'HERE/m[ray]'"),
        ('{"url": "file://HERE/m", "dir_info": {}}', "'HERE/m[ray]'"),
        ('{"url": "file://HERE/my%20own", "dir_info": {}}', "'HERE/my own[ray]'"),
        ('{"url": "file://HERE/m-1-py3-none-any.whl"}', "'HERE/m-1-py3-none-any.whl[ray]'"),
        ('{"url": "file:///removed/m", "dir_info": {"editable": true}}', "'moorage[ray]'"),
        ('{"url": "file:///removed/m-1-py3-none-any.whl"}', "'moorage[ray]'"),
        ('{"url": "https://example.org/m.whl"}', "'moorage[ray]'"),
        (None, "'moorage[ray]'"),
    ],
)
def test_the_install_command_names_the_source_of_this_installation(
    tmp_path: Path, noted, command
) -> None:
    folder = tmp_path / "moorage-0.dist-info"
    for each in (folder, tmp_path / "m", tmp_path / "my own"):
        each.mkdir()
    (tmp_path / "m-1-py3-none-any.whl").touch()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: moorage\nVersion: 0\n")
    if noted:
        (folder / "direct_url.json").write_text(noted.replace("HERE", str(tmp_path)))
    path = [str(tmp_path), *sys.path]
    program = f"import sys; sys.path = {path!r}; {PROGRAM}"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"pip install {command.replace('HERE', str(tmp_path))}\n"


def test_each_extra_has_an_install_command() -> None:
    assert install_command("aws").endswith("[aws]'")
