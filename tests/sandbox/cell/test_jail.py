"""Tests of parts of the jail that one process can check; the attacks check the rest."""

import subprocess
import sys

LOOK = """
import ctypes
from moorage.sandbox.cell import jail
PR_GET_DUMPABLE = 3
dumpable = ctypes.CDLL(None).prctl
before = dumpable(PR_GET_DUMPABLE)
jail.hide()
print(before, dumpable(PR_GET_DUMPABLE))
"""


def test_a_hidden_process_cannot_be_dumped():
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "0"]
