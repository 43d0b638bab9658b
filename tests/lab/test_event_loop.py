"""Tests of a program's coroutine that SIGTERM stops."""

import asyncio
import signal
import subprocess
import sys

import pytest

from moorage.lab.event_loop import run_until_sigterm

INSIDE_A_CALLBACK = """
import asyncio, os, signal, sys
from moorage.lab.event_loop import run_until_sigterm

class Reader(asyncio.Protocol):
    def data_received(self, data):
        signal.raise_signal(signal.SIGTERM)

async def main():
    read, write = os.pipe()
    await asyncio.get_running_loop().connect_read_pipe(Reader, os.fdopen(read, "rb"))
    os.write(write, b"x")
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
run_until_sigterm(main())
"""


def test_sigterm_within_a_callback_lets_the_program_clean_up_silently():
    process = subprocess.run(
        [sys.executable, "-c", INSIDE_A_CALLBACK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (143, "cleaned up\n", "")


def test_the_previous_signal_handler_is_restored_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    assert run_until_sigterm(asyncio.sleep(0, 7)) == 7
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cancellation_that_no_signal_caused_is_passed_on():
    async def raise_cancelled():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_sigterm(raise_cancelled())
