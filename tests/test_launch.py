"""Programs import Python's own modules, and end in one line at Ctrl-C or on a full disk."""

import fcntl
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from moorage import launch

SECONDS_MAX = 60
ENTRIES = {"moorage": "moorage_client.cli", "moored": "moorage.__main__"}
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it.
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
sys.argv = {words!r}
from {entry} import main
main()
"""
WORDS = [("moorage", "version"), ("moorage", "--help"), ("moored", "--version"), ("moored", "-h")]


def run(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX, check=False, **options
    )


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *[("moorage", at) for at in ("logging", "typer", "asyncio", "moorage_client.cli.pool")],
        *[("moored", at) for at in ("typer", "moorage.config.settings", "rich.console")],
    ],
)
def test_ctrl_c_during_the_imports_ends_in_one_line(name, at):
    words = [name, {"moorage": "version", "moored": "doctor"}[name]]
    code = INTERRUPTED.format(at=at, words=words, entry=ENTRIES[name])
    done = run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: interrupted\n")


@pytest.mark.parametrize("words", WORDS)
def test_a_full_stdout_ends_in_one_line(words):
    name, *rest = words
    with Path("/dev/full").open("w") as full:
        done = run([program(name), *rest], stdout=full)
    wanted = f"{name}: cannot write the result: No space left on device\n"
    assert (done.returncode, done.stderr) == (launch.EXIT_UNWRITABLE, wanted)


@pytest.mark.parametrize("words", WORDS)
def test_a_reader_that_closes_stdout_causes_no_error_message(words):
    name, *rest = words
    reading, writing = os.pipe()
    os.close(reading)
    done = run([program(name), *rest], stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stdout_that_refuses_to_block_gets_the_whole_output():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4_096)
    os.set_blocking(writing, False)  # As a parent process may do that uses the pipe, too.
    command = [program("moored"), "serve", "--help"]
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    with os.fdopen(reading) as stdout, process:
        select.select([stdout], [], [], SECONDS_MAX)
        text = stdout.read()
        assert (process.wait(SECONDS_MAX), process.stderr.read()) == (0, "")
    assert text == run(command).stdout


@pytest.mark.parametrize("reader", [None, "/dev/full"])
@pytest.mark.parametrize("name", ENTRIES)
def test_a_stderr_that_fails_changes_no_exit_code(name, reader):
    if reader is None:
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(reader, os.O_WRONLY)
    done = subprocess.run(
        [program(name), "no-such-command"], stderr=writing, timeout=SECONDS_MAX, check=False
    )
    os.close(writing)
    assert done.returncode == 2


@pytest.fixture
def hiding(tmp_path):
    """Return variables with a folder that hides standard modules."""
    for name in ("random", "signal", "types", "enum"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')\n")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("raise SystemExit('json of the user')\n")
    (tmp_path / "os.py").write_text("")  # Python has loaded `os` before it reads this folder.
    (tmp_path / "wave").mkdir()  # A folder without `__init__.py` hides nothing.
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def test_a_warning_names_a_file_that_hides_a_standard_module_and_the_file_is_skipped(
    hiding, tmp_path
):
    done = run([program("moored"), "doctor", "--config", "none.toml"], env=hiding)
    said = done.stderr.splitlines()
    places = ["enum.py", "json/__init__.py", "random.py", "signal.py", "types.py"]
    assert [line.split()[1] for line in said[:-1]] == [str(tmp_path / each) for each in places]
    assert "none.toml: cannot be read" in said[-1]
    assert run([program("moorage"), "version"], env=hiding).stderr == ""


def test_child_processes_import_standard_modules_and_none_from_the_working_directory(
    hiding, tmp_path
):
    probe = "def main():\n    import random, sys, types\n    print(random.random, sys.argv[1:])\n"
    (tmp_path / "probe.py").write_text(probe)
    done = run(launch.command("probe", "one", "two"), env=hiding, cwd=tmp_path)
    assert done.stdout.endswith("['one', 'two']\n"), done.stderr


def test_errors_of_the_system_are_quoted(tmp_path):
    with pytest.raises(OSError) as missing:
        (tmp_path / "none.csv").read_text()
    assert launch.reason_of(missing.value) == f"{tmp_path}/none.csv: No such file or directory"
    assert launch.reason_of(ConnectionResetError()) == "ConnectionResetError()"
    assert launch.reason_of(ValueError("a word")) == "a word"
