"""The fixture `gpu`: each test that uses it has a GPU that no other test uses."""

import time
from collections.abc import Iterator

import pytest

from moorage.slots import ResourceUnavailable
from moorage_client.pool import ResourcePoolAdapter

WAIT_SECONDS_MAX = 60


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Hold one GPU while the test runs; return its id."""
    pool = ResourcePoolAdapter()
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            held = pool.checkout([{"type": "gpus"}])
            break
        except ResourceUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    (slot,) = held["gpus"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", slot["id"])
    yield slot["id"]
    pool.checkin(held)
