"""Fixtures for pytest; enable them in `conftest.py`: `pytest_plugins = ["moorage.testing.plugin"]`.

An entry point would make every run of pytest import this module, wherever Moorage is installed. So
pytest does not load this plugin by itself.
"""

from collections.abc import Iterator, Sequence

import pytest

from moorage.testing.local_server import Document, Server, fake_cluster, server


@pytest.fixture
def moorage_fleet() -> Sequence[Document]:
    """Return the cluster documents of `moorage_server`; your `conftest.py` can override this."""
    return [fake_cluster()]


@pytest.fixture
def moorage_server(moorage_fleet: Sequence[Document]) -> Iterator[Server]:
    """Run a server for one test: it has no state of earlier tests."""
    with server(moorage_fleet) as running:
        yield running
