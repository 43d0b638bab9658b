"""Podman builds and runs the image of the Dockerfile as an operator would, without privileges."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from image_store import ROOT, Podman, image_store
from served import ask_message, bearing, cluster, tell, until
from websockets.sync.client import connect

from moorage_client import Services
from moorage_policies import catalog
from tests.certificates import certificate, pem_of
from tests.ports import free_port

pytestmark = [pytest.mark.heavy, pytest.mark.containers]

IMAGE: Final = "localhost/moorage:test"
AGENT_IMAGE: Final = "localhost/moorage-agent:test"
TOKEN: Final = "a-long-random-secret"  # noqa: S105  # A test's value.
CONTEXT: Final = ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE")
SOURCES: Final = ("server", "policies", "clients")
SAFE: Final = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp", "--cap-drop=all"),
    *("--security-opt=no-new-privileges", "--network=host"),
)
"""Options of Podman with the restrictions of compose.yaml, except for its network."""
TESTED_WITH: Final = (
    *("pytest", "_pytest", "pytest_asyncio", "pluggy", "iniconfig", "packaging", "py"),
    "typing_extensions",
)
"""Pure Python modules for tests that the image lacks."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    """A Podman that can see what the Dockerfile installs."""
    for tool in ("podman", "runc", "debootstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not here; on Debian: apt-get install {tool}")
    if os.getuid() != 0:
        pytest.skip("debootstrap and the tests' own Podman need root")
    folder = Path(tempfile.mkdtemp(prefix="pod-", dir="/tmp"))  # Podman needs a short path.
    try:
        made = Podman(folder / "root", folder / "run", image_store())
        yield made
        made.run("rm", "--all", "--force", "--volumes")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def build_output(engine: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of building the images of server and agent from this source."""
    folder = tmp_path_factory.mktemp("context")
    for name in CONTEXT:
        shutil.copy(ROOT / name, folder)
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return engine.build(folder, IMAGE, "server") + engine.build(folder, AGENT_IMAGE, "agent")


@contextlib.contextmanager
def serve_image(
    engine: Podman, *options: str, plain: bool = True, **variables: str
) -> Iterator[tuple[int, int]]:
    """Run the image as the container `moored`; yield its ports once it is healthy."""
    ports = free_port(), free_port()
    given = {
        "MOORAGE_TOKENS": f"research:{TOKEN}",
        "MOORAGE_PORT": str(ports[0]),
        "MOORAGE_HTTP_PORT": str(ports[1]),
        **({"MOORAGE_INSECURE_PLAINTEXT": "true"} if plain else {}),
        **variables,
    }
    named = [f"--env={name}={value}" for name, value in given.items()]
    engine.run("run", "-d", "--name=moored", *SAFE, *engine.bounds, *named, *options, IMAGE)
    try:
        until(lambda: is_healthy(engine) or has_ended(engine))
        assert not has_ended(engine), engine.run("logs", "moored")
        yield ports
        engine.run("stop", "--time=30", "moored")
        assert exit_code(engine) == 0, engine.run("logs", "moored")
    finally:
        engine.run("rm", "--force", "--volumes", "moored")


def is_healthy(engine: Podman) -> bool:
    """Run the health check of the image once."""
    with contextlib.suppress(AssertionError):
        engine.run("healthcheck", "run", "moored")
        return True
    return False


def has_ended(engine: Podman) -> bool:
    return engine.run("inspect", "moored", "--format={{.State.Running}}").strip() != "true"


def exit_code(engine: Podman) -> int:
    return int(engine.run("inspect", "moored", "--format={{.State.ExitCode}}").strip())


def test_without_privileges_the_container_image_serves_a_lease_and_an_agent(engine: Podman) -> None:
    own = ("--env=MOORAGE_STATE=/tmp", f"--env=MOORAGE_TOKEN={TOKEN}", "moored", "moorage", "run")
    with serve_image(engine, MOORAGE_BACKENDS="local") as (port, http_port):
        status = engine.run("exec", "moored", "cat", "/proc/1/status")
        rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(rows["Uid"].split()) == {"10001"}
        assert {rows[name].strip("0") for name in rows if name.startswith("Cap")} == {""}
        assert rows["NoNewPrivs"] == "1"
        refused = engine.run("exec", "moored", "touch", "/opt/moorage/x", "/etc/x", fails=True)
        assert refused.count("Read-only file system") == 2
        with Services(f"http://127.0.0.1:{http_port}", token=TOKEN) as services:
            services.create_cluster(cluster("east"))
            services.publish_policy(catalog.document("first_fit"))
        url = f"ws://127.0.0.1:{port}"
        with connect(url, additional_headers=bearing(TOKEN)) as connection:
            message = ask_message(resources={"gpus": 1}, lease={"ttl_seconds": 60})
            assert tell(connection, message)["lease"]["state"] == "granted"
        joining = engine.run("exec", "moored", "moored", "agent", "token", "--cluster", "boxes")
        join = (f"--env=MOORAGE_TOKEN={joining.split()[0]}", f"--env=MOORAGE_URL={url}")
        engine.run("run", "-d", "--name=box", *SAFE, *engine.bounds, *join, AGENT_IMAGE)
        try:
            until(lambda: "connected" in engine.run("logs", "box"))
            command = ("--url", url, "--cluster", "boxes", "--cpu-milli", "100", "--", "id", "-u")
            assert engine.run("exec", *own, *command).splitlines()[-1] == "10001"
        finally:
            engine.run("rm", "--force", "--volumes", "box")


def test_the_health_check_uses_tls_if_the_server_does(engine: Podman, tmp_path: Path) -> None:
    signer = certificate("an authority")
    files = dict(zip(("tls.crt", "tls.key"), pem_of(*certificate("moored", signer)), strict=True))
    for name, text in {**files, "ca.crt": pem_of(*signer)[0]}.items():
        (tmp_path / name).write_bytes(text)
    tmp_path.chmod(0o755)
    variables = {
        f"MOORAGE_TLS_{name}": f"/tls/{file}"
        for name, file in (("CERT", "tls.crt"), ("KEY", "tls.key"), ("CLIENT_CA", "ca.crt"))
    }
    with serve_image(engine, f"--volume={tmp_path}:/tls:ro", plain=False, **variables):
        closed = "--env=MOORAGE_HTTP_PORT=1"
        silent = engine.run("exec", closed, "moored", "moored", "health", fails=True)
        assert "no answer at 127.0.0.1:1" in silent


def test_without_tokens_the_container_image_names_the_missing_setting(engine: Podman) -> None:
    said = engine.run("run", "--rm", *SAFE, *engine.bounds, IMAGE, fails=True)
    assert "MOORAGE_TOKENS" in said


def test_advice_in_the_image_names_no_folder_of_its_build(engine: Podman) -> None:
    secret = f"--env=MOORAGE_TOKENS=research:{TOKEN}"
    plain = "--env=MOORAGE_INSECURE_PLAINTEXT=true"
    said = engine.run(
        "run", "--rm", *SAFE, *engine.bounds, secret, plain, IMAGE, "doctor", "--json"
    )
    assert "pip install 'moorage[aws]'" in said
    assert "/source" not in said


def test_attacks_of_policies_fail_in_the_image(engine: Podman, tmp_path: Path) -> None:
    """The suite of the sandbox, in the image and under its restrictions."""
    copy_modules(tmp_path, TESTED_WITH)
    said = engine.run(
        *("run", "--rm", *SAFE, *engine.bounds, "--no-healthcheck", "--entrypoint=python"),
        *(f"--volume={ROOT / 'tests'}:/tests:ro", f"--volume={tmp_path}:/with:ro"),
        *("--env=PYTHONPATH=/with", "--env=PYTHONDONTWRITEBYTECODE=1", IMAGE),
        *("-m", "pytest", "-q", "-c/dev/null", "--rootdir=/tests", "--noconftest"),
        *("-pno:cacheprovider", "-oasyncio_mode=auto"),
        "/tests/sandbox/attacks",
    )
    last = said.rstrip().rpartition("\n")[2]
    assert " passed" in last, said
    assert int(last.split(" passed")[0].split()[-1]) > 100
    assert "skipped" not in last


def copy_modules(folder: Path, names: Sequence[str]) -> None:
    """Copy modules that run under any Python, with their packages' metadata."""
    for name in names:
        found = importlib.util.find_spec(name)
        assert found is not None, name
        assert found.origin is not None, name
        source = Path(found.origin)
        package = source.name == "__init__.py"
        for about in source.parents[package].glob(f"{name}-*.dist-info"):
            shutil.copytree(about, folder / about.name)
        if package:
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source.parent, folder / name, ignore=unwanted)
        else:
            shutil.copy(source, folder)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)


def test_a_changed_source_installs_no_dependency_again(build_output: str) -> None:
    """The store's content was installed without any source."""
    assert "Successfully built moorage" in build_output
    assert "Using cache" in build_output
    assert "Collecting" not in build_output
