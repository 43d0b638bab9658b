"""The examples of clients, each against a real daemon."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from moorage.benchmarks.daemon_process import daemon
from moorage_policies import catalog

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def url():
    gpu = {"modelName": "A100", "memory": 40_960}
    gpus = {"count": 2, "gpus": [gpu] * 2}
    node = {"id": "n0", "vcpus": {"count": 8}, "memory": 1024, "gpus": gpus}
    with daemon() as running:
        cluster = {"id": "lab", "nodes": {"nodeData": [node]}}
        httpx.post(f"{running.http}/clusters", json=cluster).raise_for_status()
        document = catalog.document("first_fit")
        httpx.post(f"{running.http}/policy", json=document, timeout=30).raise_for_status()
        yield running.ws


def run(name, url):
    command = [sys.executable, EXAMPLES / name, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_blocking_client(url):
    assert run("blocking_client.py", url) == "yours: lab n0 GPU 0\n"


def test_the_asyncio_client(url):
    told = sorted(run("asyncio_client.py", url).splitlines())
    assert told == ["yours: n0 GPU 0", "yours: n0 GPU 1"]
