"""`pip install moorage` installs a client that works without the server."""

import os
import re
import subprocess
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from moorage_client.server_extra import MODULES

pytestmark = pytest.mark.heavy

DIRECT_MAX = 7
SERVER_ONLY = {"starlette", "uvicorn", "uvloop", "prometheus-client"}
SECONDS_MAX = 60
MIB_MAX = 60
"""Maximum MiB of the packages that `pip install moorage` adds, without Moorage itself and pip."""
Run = Callable[..., subprocess.CompletedProcess[str]]


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return found[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def project(root: Path) -> Any:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def requirements(names: list[str]) -> Iterator[str]:
    """Yield distributions and their requirements, without those of extras."""
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        for each in distribution(name).requires or ():
            requirement, _, marker = each.partition(";")
            if "extra ==" not in marker and is_installed(name_of(requirement)):
                names.append(name_of(requirement))


def is_installed(name: str) -> bool:
    """Return whether a distribution is installed; those for other operating systems are not."""
    try:
        distribution(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def client(wheel: Path, project: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Install the wheel with all its dependencies; return the Python that has them."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv").glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in requirements([name_of(each) for each in project["dependencies"]]):
        files = distribution(name).files or ()
        for top in {each.parts[0] for each in files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution(name).locate_file(top))
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("MOORAGE_")
    } | {"MOORAGE_URL": "ws://127.0.0.1:9", "MOORAGE_POOL_ADDRESS": f"uds:{folder}/none"}

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        where, _, function = project["scripts"].get(program, "").partition(":")
        code = f"from {where} import {function}; {function}()" if where else program
        return subprocess.run(
            [folder / "venv/bin/python", "-c", code, *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
        )

    return run


def test_the_number_of_direct_dependencies_is_small(project: Any) -> None:
    direct = {name_of(each) for each in project["dependencies"]}
    assert len(direct) <= DIRECT_MAX
    assert not direct & SERVER_ONLY


def test_the_extra_installs_the_imported_module(project: Any) -> None:
    extras = project["optional-dependencies"]
    assert {*extras["policy"]} <= {*extras["server"]}
    extra = {name_of(each) for each in extras["server"]}
    assert extra == {name.replace("_", "-") for name in MODULES}


@pytest.mark.parametrize(
    "code",
    [
        "import moorage_client; [getattr(moorage_client, n) for n in moorage_client.__all__]",
        "import moorage_client.workflow, moorage_client.inventory, moorage_client.pool",
        "import moorage.slots, moorage.query",
        "from moorage_client import Client, Services, BlockingClient",
        "from moorage_policies.catalog import document; document('first_fit')",
    ],
)
def test_the_libraries_need_no_server(client: Run, code: str) -> None:
    ran = client(code)
    assert ran.returncode == 0, ran.stderr


def test_the_install_is_small(project: Any) -> None:
    names = [*requirements([name_of(each) for each in project["dependencies"]])]
    files = [each for name in names for each in distribution(name).files or ()]
    paths = [Path(each.locate()) for each in files]
    assert "numpy" not in names
    assert sum(path.stat().st_size for path in paths if path.exists()) < MIB_MAX << 20


@pytest.mark.parametrize(
    "code",
    [
        "import moorage.policy",
        "from moorage.policy import Fleet",
        "from moorage.query import DocumentIndex",
    ],
)
def test_fleet_importers_name_their_extra(client: Run, code: str) -> None:
    ran = client(code)
    assert ran.returncode == 1
    assert ran.stderr.endswith("needs numpy: pip install 'moorage[policy]'\n")


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["--help"], 0),
        (["policy", "test", "--help"], 0),
        (["version"], 0),
        (["leases"], 4),
        (["fleet", "import", "--help"], 0),
        (["pool", "show"], 4),
    ],
)
def test_the_command_line_needs_no_server_package(
    client: Run, arguments: list[str], exit_code: int
) -> None:
    ran = client("moorage", *arguments)
    assert ran.returncode == exit_code, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["moored", "serve"],
        ["moored", "demo"],
        ["moored", "--help"],
        ["moorage", "pool", "serve"],
        ["moorage", "policy", "push", "first_fit"],
    ],
)
def test_commands_that_need_the_server_name_the_extra(client: Run, command: list[str]) -> None:
    ran = client(*command)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "pip install 'moorage[server]'" in ran.stderr


def test_the_error_of_policy_test_names_the_extra(client: Run, tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text("class AIOSv1PolicyRule: ...\n")
    ran = client("moorage", "policy", "test", str(tmp_path / "policy.py"))
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "pip install 'moorage[server]'" in ran.stderr


def test_the_import_of_the_client_imports_no_heavy_package(client: Run) -> None:
    """The client does not even import `typing`, which takes longer than all other modules."""
    heavy = "{'typing', 'asyncio', 're', 'requests', 'rich', 'numpy', 'msgspec', 'yaml'}"
    ran = client(f"import sys; b = set(sys.modules); import moorage_client; "
                 f"print(sorted({heavy} & (set(sys.modules) - b)))")  # fmt: skip
    assert ran.stdout == "[]\n", ran.stderr
