"""Fixtures for pytest; enable them in `conftest.py`: `pytest_plugins = ["moorage.testing.plugin"]`.

pytest does not load this module by itself: an entry point would import it in every run of pytest,
    wherever Moorage is installed.
"""

from collections.abc import Iterator, Sequence

import pytest

from moorage.testing.local_server import Document, Server, fake_cluster, server


@pytest.fixture
def moorage_fleet() -> Sequence[Document]:
    """Return the cluster documents of `moorage_server`; a fixture of this name replaces them."""
    return [fake_cluster()]


@pytest.fixture
def moorage_server(moorage_fleet: Sequence[Document]) -> Iterator[Server]:
    """Run a server for one test: it has no state of earlier tests."""
    with server(moorage_fleet) as running:
        yield running
