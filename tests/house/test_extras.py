"""Messages that name the extra to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from moorage.extras import install_command

PROGRAM = "from moorage.extras import install_command; print(install_command('ray'))"


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ('{"url": "file:///src/m", "dir_info": {"editable": true}}', "-e '/src/m[ray]'"),
        ('{"url": "file:///src/m", "dir_info": {}}', "'/src/m[ray]'"),
        ('{"url": "file:///m-1-py3-none-any.whl"}', "'/m-1-py3-none-any.whl[ray]'"),
        ('{"url": "https://example.org/m.whl"}', "'moorage[ray]'"),
        (None, "'moorage[ray]'"),
    ],
)
def test_the_install_command_names_the_source_of_this_installation(
    tmp_path: Path, noted, command
) -> None:
    folder = tmp_path / "moorage-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: moorage\nVersion: 0\n")
    if noted:
        (folder / "direct_url.json").write_text(noted)
    path = [str(tmp_path), *sys.path]
    program = f"import sys; sys.path = {path!r}; {PROGRAM}"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"pip install {command}\n"


def test_each_extra_has_an_install_command() -> None:
    assert install_command("aws").endswith("[aws]'")
