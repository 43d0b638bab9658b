"""Tests of a stream whose writers never wait, in a separate program, over pipes and a full disk."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, warnings, logging, subprocess
from moorage.daemon.observability import standard_streams
from moorage.daemon.observability.standard_streams import StandardStream
stream = StandardStream(2)
stream.report = lambda lines: f"dropped {lines}\\n".encode()
def say(line): print(line, file=sys.stderr, flush=True)
def settled():
    with stream._changed:
        stream._changed.wait_for(stream._is_idle)
"""
PAGE = 4_096


def run(body: str, stderr: int | None, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM + body]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, **more)


def test_all_output_of_a_process_arrives_in_order(tmp_path: Path) -> None:
    body = """
say("one")
warnings.warn("two")
logging.getLogger().error("three")
subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('four\\\\n')"])
os.write(2, b"five, without an end")
1 / 0
"""
    with (tmp_path / "log").open("w") as log:
        process = run(body, log.fileno())
        assert process.communicate(timeout=60) == ("", None)
    assert process.returncode == 1
    text = (tmp_path / "log").read_text()
    said = ["one", "two", "three", "four", "five, without an end", "ZeroDivisionError"]
    places = [text.index(each) for each in said]
    assert places == sorted(places)
    assert "dropped" not in text


def test_a_stalled_reader_gets_old_lines_and_the_number_of_dropped_lines() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PAGE)
    body = """
standard_streams.BACKLOG_BYTES_MAX = 1 << 16
for number in range(20_000):
    say(f"line {number:05}")
print(stream.dropped, flush=True)
input()
say("later")
settled()
print(stream.dropped, flush=True)
"""
    process = run(body, writer)
    os.close(writer)
    assert process.stdout is not None
    assert process.stdin is not None
    assert 0 < int(process.stdout.readline()) < 20_000
    following, gaps = 0, 0  # A line after a gap used space that the writing thread freed.
    with os.fdopen(reader) as log:
        while following < 20_000:
            line = log.readline().strip()
            if line.startswith("dropped"):
                lost = int(line.split()[1])
                following, gaps = following + lost, gaps + lost
            else:
                assert line == f"line {following:05}"
                following += 1
        process.stdin.write("\n")
        process.stdin.flush()
        assert log.readline() == "later\n"
        assert int(process.stdout.readline()) == gaps
        process.communicate(timeout=60)


@pytest.mark.parametrize("place", ["full", "left", "unwritable"])
def test_unwritable_lines_are_counted_and_do_not_end_the_program(place: str) -> None:
    if place == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    elif place == "left":
        reader, descriptor = os.pipe()
        os.close(reader)
    else:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    process = run("say('one\\ntwo')\nsettled()\nprint(stream.dropped)", descriptor)
    os.close(descriptor)
    assert process.communicate(timeout=60)[0] == "2\n"
    assert process.returncode == 0


def test_the_log_reports_dropped_lines_once_there_is_room(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = """
import resource
say("one")
settled()
size = os.fstat(stream._real).st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4, resource.RLIM_INFINITY))
say("two, which is cut")
say("three")
settled()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(flush=True)
input()
say("four")
"""
    with log.open("w") as file:
        process = run(body, file.fileno())
    assert process.stdout is not None
    process.stdout.readline()
    while "dropped" not in log.read_text():
        assert process.poll() is None
    process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert log.read_text() == "one\ntwo,\ndropped 2\nfour\n"


def test_a_non_blocking_descriptor_gets_all_output() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = run("for number in range(20_000): say(f'line {number:05}')\nsettled()", writer)
    os.close(writer)
    with os.fdopen(reader) as log:
        assert log.read() == "".join(f"line {number:05}\n" for number in range(20_000))
    process.communicate(timeout=60)


def test_the_end_of_a_process_does_not_wait_for_a_stalled_reader() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PAGE)
    process = run("say('.' * 100_000)\nsys.exit(7)", writer)
    os.close(writer)
    assert process.wait(60) == 7
    os.close(reader)
    process.communicate()
