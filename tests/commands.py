"""Runs commands of `moorage` inside the test process, which is quick, for tests of output."""

import contextlib
import io
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from moorage_client.cli.program import run


def run_moorage(
    words: Sequence[str | Path], folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with additional variables; return its exit code and output."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        code = run([str(word) for word in words])
    wrote = out.buffer.getvalue().decode()
    return subprocess.CompletedProcess(words, code, wrote, err.getvalue())
