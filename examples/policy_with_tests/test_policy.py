"""Tests of the policy: its score as a function, and the whole policy in the jail."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

CODE = Path(__file__).parent / "code" / "function.py"
SPEC = importlib.util.spec_from_file_location("keep_whole", CODE)
POLICY = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(POLICY)


def test_the_fullest_node_is_best_and_the_empty_one_last():
    free = np.array([4000, 1000, 3000])
    total = np.array([4000, 4000, 4000])
    assert list(np.argsort(-POLICY.score(free, total))) == [1, 2, 0]


def test_it_is_sound_in_the_jail():
    moorage = Path(sys.executable).with_name("moorage")
    command = [moorage, "policy", "test", CODE, "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert report["passed"]
