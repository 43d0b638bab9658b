"""Kinds of backends that ship, and kinds that other distributions bring as entry points."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.backends.registry import kinds
from moorage.config.settings import settings
from moorage.setting_kinds import read_settings
from moorage.testing.daemon_process import daemon

LIGHT = """
import sys
from moorage.config.settings import Config
Config.load({}, {"HOME": "/h"})
print(sorted({"boto3", "kubernetes", "ray", "docker", "pydantic"} & set(sys.modules)))
"""
KIND = """
from dataclasses import dataclass
from typing import Annotated

from moorage.backends.registry import BackendKind
from moorage.setting_kinds import NAME, Setting


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    slurm_partition: Annotated[str, Setting(NAME, "Where jobs go.")] = "main"


class SlurmKind(BackendKind[SlurmSettings]):
    name = "slurm"
    about = "`slurm` starts jobs."
    does = "starts jobs"
    settings = SlurmSettings
    engine_names = ("slurm", "sbatch")

    def open_alone(self, folder, environment):
        return self.open(None, None)

    def open(self, settings, surroundings):
        from moorage.backends.memory.backend import MemoryBackend

        backend = MemoryBackend()
        backend.name = "slurm"
        return backend


KIND = SlurmKind()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with an installed distribution that brings the backend `slurm`."""
    info = tmp_path / "moorage_slurm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moorage-slurm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moorage.backends]\nslurm = moorage_slurm:KIND\n")
    (tmp_path / "moorage_slurm.py").write_text(KIND)
    return tmp_path


def run(program: str, site: Path, **environment: str) -> str:
    own = {"PYTHONPATH": str(site), "HOME": str(site), **environment}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


def test_the_shipped_kinds_of_backends_have_a_fixed_order() -> None:
    assert list(kinds()) == ["local", "memory", "aws", "kubernetes", "ray"]


def test_settings_of_a_kind_of_backend_begin_with_the_name_of_the_kind() -> None:
    names = {name for kind in kinds().values() for name in read_settings(kind.settings)}
    assert names <= set(settings())
    for kind in kinds().values():
        assert all(name.startswith(f"{kind.name}_") for name in read_settings(kind.settings))


def test_reading_settings_imports_no_extra(tmp_path: Path) -> None:
    assert run(LIGHT, tmp_path) == "[]\n"


OPEN = """
import os
from pathlib import Path
from moorage.backends.base import BackendError
from moorage.backends.registry import Examination, Surroundings, kinds, open_backend
from moorage.config.settings import Config, settings
config = Config.load({}, {"HOME": "/h", **os.environ})
kind = kinds()["slurm"]
print(config.settings_of(kind))
print(*kind.examine(Examination(Path("/d"), "slurm" in config.backends)), sep="\\n")
try:
    surroundings = Surroundings(Path("/d"), dict, True, lambda _: None, None)
    print(open_backend(kind, config.settings_of(kind), surroundings).name)
    print(settings()["backends"].about)
except BackendError as error:
    print(error)
"""


def test_an_entry_point_adds_a_kind_of_backend(site: Path) -> None:
    given = {"MOORAGE_BACKENDS": "slurm,memory", "MOORAGE_SLURM_PARTITION": "gpu"}
    found, finding, name, about = run(OPEN, site, **given).splitlines()
    assert found == "SlurmSettings(slurm_partition='gpu')"
    assert finding == "DoctorFinding(name='backend: slurm', state='ok', detail='starts jobs')"
    assert name == "slurm"
    assert about.endswith("`slurm` starts jobs.")


ACQUIRE = """
import asyncio
from moorage.resources import MemoryResourceSpec, ResourceEngine
async def main():
    await ResourceEngine.acquire("a", MemoryResourceSpec(), "sbatch")
    print(next(iter(await ResourceEngine.monitor())).split("|")[1])
    await ResourceEngine.close()
asyncio.run(main())
"""


def test_a_resource_engine_can_use_kinds_of_other_distributions(site: Path) -> None:
    assert run(ACQUIRE, site) == "sbatch\n"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("from dataclasses", "import no_such_module\nfrom dataclasses", "No module named"),
        ("KIND = SlurmKind()", "KIND = SlurmKind", "is not a BackendKind named slurm"),
        ('name = "slurm"', 'name = "other"', "is not a BackendKind named slurm"),
        ("slurm_partition:", "partition:", "its setting partition must begin with slurm_"),
    ],
)
def test_a_broken_entry_point_is_reported(site: Path, before: str, after: str, reason: str) -> None:
    source = site / "moorage_slurm.py"
    source.write_text(source.read_text().replace(before, after))
    _, finding, error = run(OPEN, site, MOORAGE_BACKENDS="slurm,memory").splitlines()
    assert "state='broken'" in finding
    assert "cannot be loaded: " in finding
    assert reason in finding
    assert error.startswith("the backend slurm cannot be loaded: ")
    _, finding, _ = run(OPEN, site, MOORAGE_BACKENDS="memory").splitlines()
    assert "state='missing'" in finding


def test_an_entry_point_with_a_taken_name_is_reported(site: Path) -> None:
    points = site / "moorage_slurm-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text().replace("slurm =", "ray ="))
    source = site / "moorage_slurm.py"
    source.write_text(source.read_text().replace('"slurm"', '"ray"').replace("slurm_", "ray_"))
    program = (
        "from moorage.backends.registry import BrokenKind, kinds\n"
        "print([(x.name, x.reason) for x in kinds().values() if isinstance(x, BrokenKind)])"
    )
    expected = [("ray of moorage_slurm:KIND", "ray is taken")]
    assert run(program, site) == f"{expected}\n"


def test_a_setting_of_a_broken_kind_is_refused_with_the_reason(site: Path) -> None:
    (site / "moorage_slurm.py").unlink()
    program = f"import sys\nsys.stderr = sys.stdout\n{LIGHT}".replace(
        '{"HOME": "/h"}', '{"HOME": "/h", "MOORAGE_SLURM_PARTITION": "gpu"}'
    )
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(program, site)
    assert "the backend slurm, which may have it, cannot be loaded" in caught.value.stdout


@pytest.mark.heavy  # It starts a daemon.
def test_a_server_starts_despite_a_broken_entry_point(site: Path) -> None:
    (site / "moorage_slurm.py").unlink()
    with daemon(environment={"PYTHONPATH": str(site)}) as running:
        assert "backend_kind_broken" in running.log.read_text()
