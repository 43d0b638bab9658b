"""Tests of the measurement of processor time of running programs."""

import subprocess
import sys

from moorage.bench.processor_time import processor_time_of

WORK = """
import subprocess, sys, time
if "both" in sys.argv:
    command = [sys.executable, "-c", sys.argv[2], "one"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
while time.process_time() < 0.1:
    pass
print("worked", flush=True)
sys.stdin.read()
"""


def test_a_program_and_its_children_are_counted_separately():
    command = [sys.executable, "-c", WORK, "both", WORK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        before = processor_time_of(program.pid)
        assert program.stdout.readline() == b"worked\n"
        found = processor_time_of(program.pid).since(before)
        program.communicate()
    assert found.own > 0
    assert found.others > 0


def test_an_ended_program_has_no_processor_time():
    with subprocess.Popen([sys.executable, "-c", ""]) as program:
        program.wait()
    assert processor_time_of(program.pid) == (0.0, 0.0)
