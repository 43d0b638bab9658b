"""Tests of the files for operators: the Makefile, the systemd unit, and the image."""

import configparser
import json
import os
import pwd
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import yaml

from moorage.config.settings import OTHER_NAMES, Config, ConfigError, settings


def test_every_setting_is_read_somewhere(sources) -> None:
    """A setting that no code reads would have no effect."""
    text = "\n".join(each.text for each in sources if not each.name.endswith("/config.py"))
    found = re.findall(r"(?:config|settings)\.(\w+)|chosen\[.(\w+).\]", text)
    assert set(settings()) - {name for pair in found for name in pair} == set()


def test_the_daemon_accepts_every_variable_that_the_clients_read(sources) -> None:
    """The daemon refuses unknown variables, and often shares its environment with clients."""
    clients = "\n".join(each.text for each in sources if each.name.startswith("clients/"))
    names = set(re.findall(r"\bMOORAGE_[A-Z_]+\b", clients))
    assert names
    assert names <= OTHER_NAMES


@pytest.mark.parametrize("target", ["help", "demo", "test", "lint", "test-fast", "test-heavy"])
def test_the_makefile_has_its_targets_and_explains_them(root: Path, target: str) -> None:
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert re.search(rf"^make {target} +\S", shown.stdout, re.MULTILINE)


def test_without_a_supported_python_make_names_the_remedy(root: Path, tmp_path: Path) -> None:
    command = ["make", "demo", f"VENV={tmp_path / 'venv'}", "PYTHON=/no/such/python"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert shown.returncode != 0
    assert "Python 3.11 or newer" in shown.stderr
    assert "PYTHON=/path/to/python3" in shown.stderr


def test_the_script_ci_run_has_no_syntax_errors(root: Path) -> None:
    script = root / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    subprocess.run(["bash", "-n", script], check=True)


def test_the_systemd_unit_and_the_image_use_settings_that_exist(root: Path) -> None:
    known = {each.environment for each in settings().values()} | OTHER_NAMES
    for name in ("deploy/systemd/moored.service", "deploy/compose.yaml", "Dockerfile"):
        used = set(
            re.findall(
                r"^\s*(?:ENV |Environment=)?(MOORAGE_[A-Z_]+)[=:]",
                (root / name).read_text(),
                re.MULTILINE,
            )
        )
        assert used, name
        assert used <= known, name


@pytest.mark.parametrize(
    ("name", "words"), [("moored.service", ["serve"]), ("moored-agent.service", ["agent"])]
)
def test_the_systemd_unit_starts_an_installed_program(
    root: Path, name: str, words: list[str]
) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read(root / "deploy" / "systemd" / name)
    command = unit["Service"]["ExecStart"].split()
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(command[0]).name in scripts
    assert command[1:] == words


@pytest.mark.parametrize("name", ["moored.service", "moored-agent.service"])
def test_workloads_outlive_a_restart_of_the_systemd_unit(root: Path, name: str) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read(root / "deploy" / "systemd" / name)
    service = unit["Service"]
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert {"DynamicUser", "PrivateTmp"}.isdisjoint(service), "systemd ends these with the daemon"


@pytest.mark.parametrize("name", ["moored.service", "moored-agent.service"])
def test_systemd_does_not_retry_with_a_wrong_setting(root: Path, name: str) -> None:
    """Retries would push the reason out of `systemctl status`, and delay the start after a mend."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read(root / "deploy" / "systemd" / name)
    assert "2" in unit["Service"]["RestartPreventExitStatus"].split()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_accepts_the_unit(root: Path, tmp_path: Path) -> None:
    folder = root / "deploy" / "systemd"
    units = ["moored.service", "moored-agent.service"]
    for each in units:
        shutil.copy(folder / each, tmp_path)
    (tmp_path / "moored.service.d").mkdir()
    shutil.copy(folder / "moored-workloads.conf", tmp_path / "moored.service.d")
    command = ["systemd-analyze", "verify", *(tmp_path / each for each in units)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    unheard = [line for line in shown.splitlines() if "moored is not executable" not in line]
    about = [*units, str(tmp_path)]
    assert [line for line in unheard if any(each in line for each in about)] == []


def test_no_systemd_unit_hides_devices_from_workloads(root: Path) -> None:
    """`ProtectClock=yes` hides devices before systemd 253."""
    folder = root / "deploy" / "systemd"
    assert "\nProtectClock=" not in (folder / "moored-agent.service").read_text()
    workloads = (folder / "moored-workloads.conf").read_text()
    assert {"PrivateDevices=no", "ProtectClock=no"} <= set(workloads.splitlines())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize(("name", "tenths"), [("moored", 33), ("moored-agent", 42)])
def test_systemd_rates_the_exposure_of_the_unit_as_low(root: Path, name: str, tenths: int) -> None:
    """systemd rates exposure from 0 to 10; network, namespaces and workloads cause the rest."""
    unit = root / "deploy" / "systemd" / f"{name}.service"
    # 0 is not an exposure, and over 50 counts as medium.
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={tenths}", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.rstrip().rpartition("\n")[2]


def test_compose_gives_the_container_no_privilege_and_opens_no_port_to_the_network(
    root: Path,
) -> None:
    text = (root / "deploy" / "compose.yaml").read_text()
    service = yaml.safe_load(text)["services"]["moored"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert all(each.startswith("127.0.0.1:") for each in service["ports"])
    image = (root / "Dockerfile").read_text()
    assert f"VOLUME {service['volumes'][0].partition(':')[2]}" in image


def test_the_container_image_needs_tokens_beyond_loopback(root: Path) -> None:
    image = (root / "Dockerfile").read_text()
    environ = dict(
        re.findall(
            r"\b(MOORAGE_[A-Z_]+)=(\S+)",
            image.partition(" AS server\n")[2].partition("# Beyond")[0],
        )
    )
    environ.pop("MOORAGE_TOKENS", None)
    with pytest.raises(ConfigError, match="MOORAGE_TOKENS"):
        Config.load({}, environ)


def test_the_image_checks_the_health_at_the_set_port_and_keeps_its_data(root: Path) -> None:
    image = (root / "Dockerfile").read_text()
    assert 'CMD ["moored", "health"]' in image.partition("HEALTHCHECK")[2]
    installing, _, building = image.partition(" AS build\n")
    assert "COPY server" not in installing
    assert "pip install" in installing
    assert "--no-deps" in building
    program = re.search(r'python -c "(.*?)" > needs', installing, re.DOTALL)
    assert program is not None
    command = [sys.executable, "-c", program[1].replace("\\\n", "")]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert {"numpy", "uvicorn", "psycopg", "pyjwt"} <= {
        re.split(r"[<>=\[ ]", line)[0] for line in shown.splitlines()
    }


def test_the_changelog_names_the_version(root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert version in (root / "CHANGELOG.md").read_text()


def wrapper_at(root: Path, place: Path, **values: str) -> Path:
    """Copy the wrapper of the systemd unit to a folder, with other values of its variables."""
    text = (root / "deploy" / "systemd" / "moored").read_text()
    for name, value in values.items():
        line = f"{name} = {value!r}"
        text, count = re.subn(rf'^{name} = ".*"$', line, text, flags=re.MULTILINE)
        assert count == 1, name
    text, count = re.subn(r"^#!/opt/moorage/bin/python ", f"#!{sys.executable} ", text)
    assert count == 1
    wrapper = place / "moored"
    wrapper.write_text(text)
    wrapper.chmod(0o755)
    (place / "moorage").symlink_to("moored")
    return wrapper


SHOW = "import json, os\nprint(json.dumps(dict(os.environ)))\n"
AS_NOBODY = """
import os, pwd, re, shutil, sys, typing
os.environ["PATH"] = "/nowhere"
os.setgroups([])
os.setresuid(65534, 65534, 65534)
del sys.argv[0]
exec(open(sys.argv[0]).read())
"""
"""Runs the wrapper as another user, who may not start this Python, and without `sudo`."""


def test_the_wrapper_uses_folder_settings_and_user_of_the_systemd_unit(root: Path) -> None:
    folder = root / "deploy" / "systemd"
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read(folder / "moored.service")
    service, text = unit["Service"], (folder / "moored").read_text()
    chosen = dict(re.findall(r'^(\w+) = "(.*)"$', text, re.MULTILINE))
    assert chosen["user"] == service["User"]
    assert f"-{chosen['settings']}" == service["EnvironmentFile"]
    assert f"{chosen['programs']}/moored" == service["ExecStart"].split()[0]
    assert chosen["environment"] == service["Environment"].replace("%S", "/var/lib")
    assert text.startswith(f"#!{chosen['programs']}/python ")
    home = re.search(r"--home-dir (\S+)", (folder / "moored.service").read_text())
    assert home is not None
    assert chosen["home"] == home[1]
    (installed,) = re.findall(r"^# Install:  (.*)$", text, re.MULTILINE)
    assert installed in (root / "docs" / "how-to" / "install.md").read_text()


def test_the_wrapper_passes_arguments_and_the_settings_of_the_unit(
    root: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("moored", "moorage"):
        show = 'printf "%s\\n" "${0##*/}" "$MOORAGE_DATA_DIR|$MOORAGE_TOKENS|$PGPASSWORD" "$@"'
        (programs / name).write_text(f"#!/bin/sh\n{show}\n")
        (programs / name).chmod(0o755)
    settings = tmp_path / "moored.env"
    settings.write_text(
        "# MOORAGE_TOKENS=old:old\n\n MOORAGE_TOKENS=ann:$HOME`id` two  \n; x=y\n"
        "PGPASSWORD=\"it's = \"\nMOORAGE_DATA_DIR='/srv/of ours'"
    )
    me = pwd.getpwuid(os.geteuid()).pw_name
    given = {"programs": str(programs), "settings": str(settings), "user": me}
    wrapper = wrapper_at(root, tmp_path, **given)
    words = ["audit", "--who", "two words", "", "*", "$HOME"]

    def lines(program: Path) -> list[str]:
        environment = {"PATH": os.environ["PATH"], "MOORAGE_DATA_DIR": "x", "PGPASSWORD": "x"}
        command, environment = [program, *words], environment | {"MOORAGE_TOKENS": ""}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    expected = "/srv/of ours|ann:$HOME`id` two|it's = "
    assert lines(wrapper) == ["moored", expected, *words]
    assert lines(tmp_path / "moorage") == ["moored", expected, *words]
    words[0] = "leases"
    assert lines(tmp_path / "moorage") == ["moorage", "x||x", *words]
    settings.unlink()
    assert lines(wrapper)[1] == "/var/lib/moorage||x"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('A="{\\"a\\": 1}"', {"A": '{"a": 1}'}),
        (r"A=a\\b", {"A": r"a\b"}),
        (r"A=a\ b\  ", {"A": "a b "}),
        ("A=one\\\n two\nB=2", {"A": "one two", "B": "2"}),
        ('A="one\ntwo" "three" four ', {"A": "one\ntwothreefour"}),
        ('A="a\\x \\$b"', {"A": r"a\x $b"}),
        ("A='a\\b'", {"A": r"a\b"}),
        ("A='open", {"A": "open"}),
        ("A = sp ", {"A": "sp"}),
        ("A-X=1\nexport A=2\n1=1\nB\n=C\n;D=1\n #E=1\nF=#\r\n", {"F": "#"}),
        ("A=\xdf\nB=\udcff\nC=\0", {"A": "\xdf"}),
        ("A=", {"A": ""}),
    ],
)
def test_the_wrapper_reads_settings_as_systemd_does(
    root: Path, line: str, expected: dict[str, str]
) -> None:
    wrapper = runpy.run_path(str(root / "deploy" / "systemd" / "moored"))
    assert wrapper["assignments"](line) == expected


def test_no_variable_changes_the_wrapper_itself(root: Path, tmp_path: Path) -> None:
    program = tmp_path / "moored-program"
    program.mkdir()
    (program / "moored").write_text(f"#!{sys.executable} -I\n" + SHOW)
    (program / "moored").chmod(0o755)
    settings = tmp_path / "moored.env"
    own = {"user": "no-such-user", "home": "/x", "programs": "/x", "settings": "/x", "PATH": "/x"}
    settings.write_text("".join(f"{name}={value}\n" for name, value in own.items()))
    me = pwd.getpwuid(os.geteuid()).pw_name
    given = {"programs": str(program), "settings": str(settings), "user": me}
    environment = {"PYTHONHOME": "/x", "PATH": "/x"}
    command = [wrapper_at(root, tmp_path, **given), "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert {name: shown[name] for name in own} == own
    assert shown["HOME"] == "/var/lib/moorage"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_wrapper_runs_as_the_user_of_the_unit(root: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        settings = place / "moored.env"
        settings.write_text("MOORAGE_TOKENS=ann:sesame12\n")
        settings.chmod(0o600)
        (place / "bin").mkdir()
        program = place / "bin" / "moored"
        program.write_text('#!/bin/sh\nid -un; printf "%s\\n" "$MOORAGE_TOKENS" "$@"\n')
        program.chmod(0o755)
        another = pwd.getpwuid(65534).pw_name
        given = {"programs": str(program.parent), "settings": str(settings), "user": another}
        command = [str(wrapper_at(root, place, **given)), "token", "create", "two words"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [another, "ann:sesame12", *command[1:]]
        for name, sentence in (
            (another, f"only root can read {settings}"),
            ("root", "run this command as root"),
            ("no-such-user", "there is no user no-such-user"),
        ):
            (place / name).mkdir()
            wrapper = wrapper_at(root, place / name, **given | {"user": name})
            words = (sys.executable, "-c", AS_NOBODY, wrapper, "token")
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
            assert done.stderr.count("\n") == 1
