"""The commands of the pages for day two run as an operator types them, with folders of the test.

Each line of a block `text` comes from its page. Only places, names of machines and dates differ.
"""

import functools
import getpass
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.database import PostgresServer
from moorage.testing.daemon_process import child, daemon
from moorage_client import BlockingClient, Lease, Services, Unauthorized
from moorage_policies import catalog
from tests.certificates import certificate, pem_of
from tests.waiting import until

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"(new-machine:)?(?<![\w.])/(?=(?:var|etc|opt|usr/local)/)")
LEFT_OUT = {
    ("install.md", "Container"): "tests/end_to_end/test_image.py runs the image",
    ("install.md", "Kubernetes, with Helm"): "the tests in tests/kubernetes run the chart",
    ("install.md", "Two servers, with PostgreSQL"): "as for Helm",
    ("install.md", "A proxy that ends TLS"): "settings; tests/end_to_end/test_proxies.py",
    ("upgrade.md", "Container"): "as for the container of install.md",
    ("upgrade.md", "Helm"): "as for Helm of install.md",
    ("replace-a-machine.md", "A machine with an agent"): "tests/end_to_end/test_agents.py",
    ("a-second-server.md", "Start two servers"): "an output; tests/end_to_end/test_takeover.py",
    ("a-second-server.md", "Read from a standby"): "messages; test_standby_reads.py beside it",
    ("a-second-server.md", "Change the server that leads"): "tests/end_to_end/test_takeover.py",
}
"""Sections with lines that are not typed here, each with the reason or the test."""
SKIPPED = ("pip install ", "moored serve ")
"""Starts of lines that are not typed: the extras are installed, and `systemctl` serves."""
SHIMS = {
    "chown": ":",  # The test has no user `moorage`.
    "useradd": ":",
    "install": 'command -p install $(sed "s/-o moorage//" <<<"$*")',
    "rsync": 'mkdir -p "$3" && cp -a "$2." "$3"',
    # The release finds its dependencies in the environment of the tests, so no index is asked. Its
    # wheel is built from the tree once.
    "python3": f'''{sys.executable} "$@" --without-pip
echo {sysconfig.get_path("purelib")} >"$(echo "$3"/lib/python3*/site-packages)/tests.pth"
echo '{sys.executable} -m pip --python "${{0%/bin/pip}}" "${{@/#./$WHEEL}}"' >"$3/bin/pip"
chmod +x "$3/bin/pip"''',
}
PIP = dict.fromkeys(("PIP_NO_INDEX", "PIP_NO_DEPS", "PIP_NO_COMPILE"), "1")
FIRST_FIT = "first_fit:1.0-stable"
ONE = {"resources": {"gpus": 1}, "lease": {"ttl_seconds": 3_600}}
ALL = slice(None)
NODE = {"vcpus": {"count": 32}, "memory": 131_072, "gpus": {"count": 64, "gpus": [{}] * 64}}


def typed(page: str, kind: str = "text") -> dict[str, list[str]]:
    """Return the lines that a reader of a page types, by the headings of their sections."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    parts = re.split(r"^##+ (.+)\n", text, flags=re.MULTILINE)
    sections = {
        heading: "".join(block for language, block in BLOCK.findall(body) if language == kind)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    prompt = "$ " if kind == "console" else ""
    return {
        heading: [each[len(prompt) :] for each in lines.splitlines() if each.startswith(prompt)]
        for heading, lines in sections.items()
        if lines
    }


class Machine:
    """A machine with the places of the page Install below a folder: one server, one operator."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.words = folder, {"db.example": "127.0.0.1"}
        self.variables = {"MOORAGE_LOG_LEVEL": "info", **PIP}
        self.service = stack.enter_context(ExitStack())
        for each in ("etc/moorage", "etc/systemd/system", "opt", "var/lib", "var/backups", "shims"):
            (folder / each).mkdir(parents=True)
        for name, text in SHIMS.items():
            self.write(f"shims/{name}", f"#!/bin/bash\n{text}\n").chmod(0o755)
        (folder / "opt" / "moorage").symlink_to(sys.prefix)
        self.bin = folder / "usr" / "local" / "bin"
        self.bin.mkdir(parents=True)
        shutil.copy(ROOT / "deploy" / "systemd" / "moored", self.bin)
        (self.bin / "moorage").symlink_to("moored")
        self.localise_command()
        self.set()

    def write(self, name: str, text: str | bytes) -> Path:
        place = self.folder / name
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
        return place

    def localise_command(self) -> None:
        text = (
            (self.bin / "moored")
            .read_text()
            .replace('user = "moorage"', f'user = "{getpass.getuser()}"')
        )
        self.write("usr/local/bin/moored", self.localise(text))

    def localise(self, text: str) -> str:
        for word, here in self.words.items():
            text = text.replace(word, here)
        new = self.folder.with_name("new-machine")
        return PLACE.sub(lambda found: f"{new if found[1] else self.folder}/", text)

    def set(self, *lines: str) -> None:
        """Write the settings of the server."""
        text = "\n".join(["MOORAGE_PORT=0", "MOORAGE_HTTP_PORT=0", *lines])
        self.write("etc/moorage/moored.env", self.localise(text))

    def environment(self) -> dict[str, str]:
        given = {name: text for name, text in os.environ.items() if name[:8] != "MOORAGE_"}
        path = os.pathsep.join([str(self.folder / "shims"), str(self.bin), given["PATH"]])
        return {**given, **self.variables, "PATH": path}

    def type(self, page: str, heading: str, lines: slice = ALL, **more: Any) -> str:
        """Type lines of a section of a page, and return what they print.

        `kind` is the language of the blocks, `place` the current folder, and the lines in `fails`
        must end with exit code 1.
        """
        printed = ""
        for line in typed(page, more.get("kind", "text"))[heading][lines]:
            if line.startswith("systemctl "):
                self.serve(line.split()[1])
            elif not line.startswith(SKIPPED):
                done = subprocess.run(
                    ["bash", "-c", self.localise(line)],
                    cwd=more.get("place", self.folder),
                    env=self.environment(),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                printed += done.stdout
                said = f"{line}\n{done.stdout}\n{done.stderr}"
                assert done.returncode == (line in more.get("fails", ())), said
        return printed

    def serve(self, verb: str = "start") -> None:
        """Start or stop the server, as a verb of `systemctl` does."""
        if verb in {"stop", "disable"}:
            self.service.close()
        elif verb in {"start", "enable"}:
            command = [str(self.bin / "moored"), "serve"]
            served = child(command, self.folder / "log", self.environment())
            self.process, self.ready = self.service.enter_context(served)

    def grant(self, count: int = 1, **given: str) -> list[Lease]:
        with BlockingClient(self.ready["ws"], **given) as client:
            return [client.ask(FIRST_FIT, **ONE).lease for _ in range(count)]

    def has(self, *leases: Lease, **given: str) -> bool:
        """Return whether the server has these leases, with their tokens, and no others."""
        with BlockingClient(self.ready["ws"], **given) as client:
            renewed = {client.renew(each.id, each.token).id for each in leases}
            return {each.id for each in client.leases()} == renewed


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lease]:
    """The data folder of a stopped server with a cluster and a policy, and its only lease."""
    data = tmp_path_factory.mktemp("filled") / "data"
    with daemon(data) as running, Services(running.http) as services:
        services.put_cluster({"id": "lab", "nodes": {"nodeData": [{"id": "node-1", **NODE}]}})
        services.publish_policy(catalog.document("first_fit"))
        with BlockingClient(running.ws) as client:
            return data, client.ask(FIRST_FIT, **ONE).lease


@pytest.fixture
def held(filled: tuple[Path, Lease]) -> list[Lease]:
    return [filled[1]]


@pytest.fixture
def machine(tmp_path: Path, filled: tuple[Path, Lease]) -> Iterator[Machine]:
    with ExitStack() as stack:
        made = Machine(tmp_path / "machine", stack)
        shutil.copytree(filled[0], made.folder / "var" / "lib" / "moorage")
        yield made


def test_each_section_is_typed_or_left_out_for_a_reason() -> None:
    here = Path(__file__).read_text()
    pages = {*re.findall(r'type\("([\w-]+\.md)"', here), *(page for page, _ in LEFT_OUT)}
    for page in pages:
        for heading in typed(page):
            is_typed = f'type("{page}", "{heading}"' in here
            assert is_typed != ((page, heading) in LEFT_OUT), (page, heading)


def test_a_backup_is_made_and_restored(machine: Machine, held: list[Lease]) -> None:
    machine.serve()
    machine.type("back-up-and-restore.md", "Back up")
    (later,) = machine.grant()
    (backup,) = (machine.folder / "var" / "backups" / "moorage").iterdir()
    machine.words["2026-01-31"] = backup.name
    machine.type("back-up-and-restore.md", "Restore")
    assert machine.has(*held)
    assert machine.grant()[0].fencing > later.fencing + 10**11


def test_damage_is_named_and_repaired(machine: Machine, held: list[Lease]) -> None:
    machine.serve()
    granted = held + machine.grant(20)
    machine.process.kill()  # As a power cut does.
    machine.serve("stop")
    log = machine.folder / "var" / "lib" / "moorage" / "ledger.db-wal"
    content = bytearray(log.read_bytes())
    for place in range(len(content) // 2, len(content), 4_096):  # In each frame from there on.
        content[place] ^= 1
    log.write_bytes(content)
    failing = ["moored ledger verify", "moored ledger repair"]
    said = machine.type("recover-a-damaged-disk.md", "Find out", fails=failing)
    assert "ledger.db-wal: frame" in said
    said = machine.type("recover-a-damaged-disk.md", "Go on", fails=failing)
    left = granted[: int(re.findall(r"(\d+) leases: ", said)[-1])]
    assert 0 < len(left) < len(granted)
    machine.type("recover-a-damaged-disk.md", "Find out")
    machine.serve()
    assert machine.has(*left)


def test_an_installed_release_is_upgraded_and_rolled_back(
    machine: Machine, held: list[Lease], wheel: Path
) -> None:
    machine.variables["WHEEL"] = str(wheel)
    programs = machine.folder / "opt" / "moorage"
    for each in (programs, machine.bin / "moored", machine.bin / "moorage"):
        each.unlink()
    machine.type("install.md", "systemd", slice(6), place=ROOT)
    machine.localise_command()
    token = {"token": machine.type("install.md", "systemd", slice(6, None)).split()[-1]}
    first = programs.stat().st_ino
    machine.type("upgrade.md", "systemd", slice(5), place=ROOT)
    assert programs.stat().st_ino != first
    assert machine.has(*held, **token)
    held += machine.grant(**token)
    machine.type("upgrade.md", "systemd", slice(5, None))
    assert programs.stat().st_ino == first
    assert machine.has(*held, **token)


def test_the_server_moves_to_another_machine(
    machine: Machine, held: list[Lease], tmp_path: Path
) -> None:
    machine.serve()
    with ExitStack() as stack:
        new = Machine(tmp_path / "new-machine", stack)
        machine.type("replace-a-machine.md", "The server's machine", slice(3))
        said = new.type("replace-a-machine.md", "The server's machine", slice(3, None))
        assert "undamaged" in said
        assert new.has(*held)


def test_a_token_and_a_certificate_are_rotated(machine: Machine) -> None:
    (machine.folder / "data").symlink_to("var/lib/moorage")  # The name of the folder on the page.
    authority = certificate("authority")
    trusted = str(machine.write("ca.pem", pem_of(*authority)[0]))
    for stem, days in (("etc/moorage/server", 1), ("new", 9)):
        for end, text in zip(
            ("pem", "key"), pem_of(*certificate("a", authority, days)), strict=True
        ):
            machine.write(f"{stem}.{end}", text)
    names = "MOORAGE_TLS_CERT=/etc/moorage/server.pem", "MOORAGE_TLS_KEY=/etc/moorage/server.key"
    machine.set(*names)
    machine.serve()
    machine.variables |= {"MOORAGE_CA_FILE": trusted, "MOORAGE_URL": machine.ready["ws"]}
    rotate = functools.partial(machine.type, "rotate-tokens-and-certificates.md")
    rotate("A named token", slice(1), kind="console")
    old = {"ca_file": trusted, "token": (machine.folder / "ci.token").read_text().strip()}
    held = machine.grant(**old)
    rotate("A named token", slice(1, None), kind="console")
    new = {"ca_file": trusted, "token": (machine.folder / "ci-2.token").read_text().strip()}
    assert machine.has(*held, **new)
    with pytest.raises(Unauthorized):
        machine.grant(**old)
    machine.words["moorage.example:8080"] = machine.ready["http"].partition("//")[2]
    machine.type("rotate-tokens-and-certificates.md", "A certificate")
    look = functools.partial(rotate, "A certificate", slice(2, None))
    ends = subprocess.check_output(
        ["openssl", "x509", "-noout", "-enddate", "-in", machine.folder / "new.pem"], text=True
    )
    until(lambda: look() == ends)


@pytest.mark.postgres
def test_a_server_moves_to_postgresql_and_back(
    machine: Machine, held: list[Lease], postgres: PostgresServer
) -> None:
    address = {"PGHOST": "127.0.0.1", "PGPORT": str(postgres.port), "PGUSER": "moorage"}
    machine.variables |= address
    try:
        machine.type("keep-everything-in-postgresql.md", "Prepare the database")
        machine.type("keep-everything-in-postgresql.md", "Move a server", slice(2))
        machine.set("MOORAGE_STORAGE=postgresql://moorage_server@db.example/moorage")
        machine.type("keep-everything-in-postgresql.md", "Start the server")
        machine.serve()
        assert machine.has(*held)
        held += machine.grant()
        machine.serve("stop")
        machine.type("keep-everything-in-postgresql.md", "Move a server", slice(2, None))
        machine.set("MOORAGE_DATA_DIR=/var/lib/moorage-back")
        machine.serve()
        assert machine.has(*held)
        machine.serve("stop")
        machine.type("back-up-and-restore.md", "With PostgreSQL")
        machine.set("MOORAGE_STORAGE=postgresql://moorage_server@db.example/restored")
        machine.serve()
        assert machine.has(*held)
        assert machine.grant()[0].fencing > held[-1].fencing + 10**11
    finally:
        machine.serve("stop")
        for each in (
            "DATABASE moorage",
            "DATABASE restored",
            "ROLE moorage_owner",
            "ROLE moorage_server",
        ):
            postgres.execute(f"DROP {each.replace(' ', ' IF EXISTS ')}")
