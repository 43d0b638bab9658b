"""A start that fails leaves nothing behind."""

import asyncio
import socket

import pytest

from moorage.config.settings import Config
from moorage.daemon.observability.counters import Measures
from moorage.daemon.start import start


async def test_a_failed_start_ends_its_tasks(tmp_path):
    before = asyncio.all_tasks()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(data_dir=tmp_path, http_host="127.0.0.1", http_port=port, sandbox="unsafe")
        with pytest.raises(OSError, match="in use: stop what listens there, or set "):
            await start(config, Measures())
    assert asyncio.all_tasks() == before
