"""Tests for users without a home folder, as in containers with ids that no list of users has."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
NOBODY = ("unshare", "--user", "--map-user=54321", "--map-group=54321")


@pytest.fixture(scope="module")
def homeless():
    """Run a program as a user who has neither HOME nor an entry in /etc/passwd."""
    if subprocess.run([*NOBODY, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system gives no user namespaces")

    def run(program, *arguments, **variables):
        command = [*NOBODY, str(BIN / program), *arguments]
        given = {"PATH": os.environ["PATH"], **variables}
        return subprocess.run(
            command, env=given, capture_output=True, text=True, check=False, timeout=60
        )

    return run


@pytest.fixture
def no_home(monkeypatch):
    """Hide the home folder from this process."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_programs_name_the_option_to_set(homeless, harbour):
    done = homeless("moorage", "ask", "first:1-x", "--ttl=20", MOORAGE_URL=harbour.url)
    assert done.returncode == 0, done.stderr
    [lease] = harbour.leases.values()
    assert lease["id"] in done.stdout
    assert f"token, which was not stored: {lease['token']}" in done.stderr
    assert "MOORAGE_STATE" in done.stderr
    assert "Traceback" not in done.stderr
    lost = homeless("moored", "serve")
    assert lost.returncode == 2
    assert lost.stderr.startswith("moored: data_dir (default): this user has no home folder;")
    assert "--data" in lost.stderr
    assert "MOORAGE_DATA_DIR" in lost.stderr


@pytest.mark.usefixtures("no_home")
def test_a_command_with_a_named_state_file_or_token_needs_no_home(shell, harbour, tmp_path):
    del shell.environment["XDG_STATE_HOME"]
    shell.environment.pop("HOME", None)
    granted = shell("ask", "first:1-x", "--ttl=20")
    [lease] = harbour.leases.values()
    assert f"token, which was not stored: {lease['token']}" in granted.stderr
    for command in ("renew", "release"):
        done = shell(command, lease["id"], f"--lease-token={lease['token']}")
        assert (done.returncode, done.stderr) == (0, "")
    unnamed = shell("renew", lease["id"])
    assert (unnamed.returncode, "MOORAGE_STATE" in unnamed.stderr) == (5, True)
    shell.environment["MOORAGE_STATE"] = str(tmp_path / "leases.json")
    assert "not stored" not in shell("ask", "first:1-x", "--ttl=20").stderr
    assert shell("release", "l-2").returncode == 0


@pytest.mark.usefixtures("no_home")
def test_the_installation_of_completion_says_that_it_needs_a_home(shell):
    shell.environment.pop("HOME", None)
    done = shell("--install-completion", "bash")
    assert (done.returncode, "set HOME" in done.stderr, "Traceback" in done.stderr) == (2, True, 0)


@pytest.mark.heavy
def test_without_a_home_no_kubeconfig_is_found(homeless):
    unnamed = homeless("moorage", "fleet", "import", "kubernetes", "--dry-run")
    assert "give --cluster-id NAME" in unnamed.stderr
    named = homeless("moorage", "fleet", "import", "kubernetes", "--cluster-id=a", "--dry-run")
    assert "there is no kubeconfig ~/.kube/config; set KUBECONFIG" in named.stderr
    assert "Traceback" not in named.stderr


def test_an_agent_needs_a_home_only_if_no_folder_is_given(homeless, tmp_path):
    wrong = homeless("moored", "agent")
    assert wrong.returncode == 2
    assert wrong.stderr == "moored: --data: expected a folder: this user has no home folder\n"
    done = homeless("moored", "agent", "--data", str(tmp_path / "agent"))
    assert (done.returncode, "this machine has not joined" in done.stderr) == (3, True)
