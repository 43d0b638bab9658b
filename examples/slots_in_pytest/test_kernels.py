"""Tests that each need their own GPU."""

import os
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range(8))
def test_a_gpu_is_mine_alone(gpu: str, number: int) -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    mark = Path(os.environ.get("MARKS", "/tmp")) / f"gpu-{gpu}"
    mark.mkdir()  # Fails if another test has this GPU.
    time.sleep(0.05)
    mark.rmdir()
