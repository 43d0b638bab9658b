"""The library's own folder: one for each process, and none that is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, os, signal, sys
from moorage.resources import ProcessResourceSpec, ResourceEngine
async def main():
    await ResourceEngine.start(ProcessResourceSpec(command=["sleep", "1000"]))
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "closed":
        await ResourceEngine.close()
asyncio.run(main())
"""


def played(home: Path, end: str) -> int:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(home)}
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", SCRIPT, end]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert "unclosed file" not in done.stderr
    return done.returncode


def test_a_process_leaves_no_folder_and_one_that_was_killed_leaves_it_to_the_next(tmp_path):
    assert played(tmp_path, "killed") == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert played(tmp_path, "closed") == 0
    assert not left.exists()
    assert played(tmp_path, "forgotten") == 0
    assert list(tmp_path.iterdir()) == []
