"""The wheel has the whole product and no other file."""

import subprocess
import sys
import zipfile
from pathlib import Path


def test_the_wheel_has_every_source_file_and_no_other_file(wheel: Path, tree) -> None:
    tops = ("server/", "policies/", "clients/moorage_client/")
    expected = {
        each.name.partition("/")[2]
        for each in tree
        if each.name.startswith(tops) and each.name.count("/") > 1
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_runs_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    """An installed policy package is found although no checkout is near."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import moorage, moorage_client; from moorage_policies.catalog import shipped; "
        "print(moorage.__file__, *shipped())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    where, *policies = ran.stdout.split()
    assert where.startswith(str(tmp_path))
    assert "first_fit" in policies
