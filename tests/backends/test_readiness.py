"""Readiness probes of workloads that answer too much, too slowly, or with another address."""

import asyncio
import contextlib
import gzip

import pytest

from moorage.backends.base import BackendError
from moorage.backends.local.readiness import answers
from moorage.backends.specs import APIModelResourceSpec, Readiness
from moorage.resources.resources import ResourceStatus
from moorage.resources.runners import CHAT_BYTES_MAX, APIModelResource

MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\n"
BUFFERS_MAX = 64 * MIB
"""More bytes than the buffers of two sockets can hold: bytes that were sent and not read."""
SECONDS = 0.3
BOMB = gzip.compress(bytes(64 * MIB))


class Talker:
    """A server that sends `talk` to each client, and counts requests and bytes."""

    def __init__(self, talk):
        self.talk = talk
        self.requests = 0
        self.sent = 0
        self.tasks = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error):
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def serve(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        self.requests += 1
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            async for piece in self.talk():
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
        writer.close()


async def flood():
    yield HEAD + b"\r\n"
    for _ in range(700):
        yield bytes(MIB)


async def bomb():
    yield HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % (8 * len(BOMB))
    for _ in range(8):
        yield BOMB


async def drip():
    yield HEAD
    while True:
        yield b"x: y\r\n"
        await asyncio.sleep(0.01)  # The answer never ends and never pauses.


async def drip_of_interim_answers():
    while True:
        yield b"HTTP/1.1 103 Early Hints\r\n\r\n"
        await asyncio.sleep(0.01)  # As above.


async def drip_of_a_body():
    yield HEAD + b"content-length: 1000\r\n\r\n"
    while True:
        yield b" "
        await asyncio.sleep(0.01)  # As above.


async def refuse():
    yield b"HTTP/1.1 503 Soon\r\ncontent-length: 0\r\n\r\n"


async def nonsense():
    yield b"220 mail.example ESMTP\r\n"


TALKS = [
    (flood, True),
    (bomb, True),
    (drip_of_a_body, True),
    (drip, False),
    (drip_of_interim_answers, False),
    (refuse, False),
    (nonsense, False),
]


@pytest.mark.parametrize(("talk", "ready"), TALKS, ids=[talk.__name__ for talk, _ in TALKS])
async def test_a_readiness_probe_reads_no_more_than_the_status_line(talk, ready):
    async with Talker(talk) as talker, asyncio.timeout(20):
        probe = Readiness(path="/health", timeout_seconds=SECONDS)
        assert await answers(probe, "127.0.0.1", talker.port, None) is ready
        model = APIModelResource(
            "m", APIModelResourceSpec(base_url=talker.url, model_name_or_path="m")
        )
        status = await model.get_status()
        assert (status is ResourceStatus.RUNNING) is ready
    assert talker.requests == 2
    assert talker.sent < BUFFERS_MAX


async def test_a_redirect_counts_as_an_answer_to_a_probe_and_is_not_followed():
    async def redirect():
        yield b"HTTP/1.1 302 Found\r\nlocation: %s/\r\n\r\n" % elsewhere.url.encode()

    async with Talker(refuse) as elsewhere, Talker(redirect) as talker:
        probe = Readiness(path="/health", timeout_seconds=20)
        assert await answers(probe, "127.0.0.1", talker.port, None)
        assert (talker.requests, elsewhere.requests) == (1, 0)


CHATS = [
    (flood, f"answered with more than {CHAT_BYTES_MAX} bytes"),
    (bomb, "did not answer"),
    (drip, "did not answer within 0.3 s"),
    (drip_of_a_body, "did not answer within 0.3 s"),
    (refuse, "503"),
]


@pytest.mark.parametrize(("talk", "what"), CHATS, ids=[talk.__name__ for talk, _ in CHATS])
async def test_a_models_answer_is_limited_in_bytes_and_time(talk, what):
    async with Talker(talk) as talker, asyncio.timeout(20):
        seconds = 10 if talk is flood else SECONDS
        spec = APIModelResourceSpec(
            base_url=talker.url, model_name_or_path="m", request_timeout=seconds
        )
        with pytest.raises(BackendError, match=what):
            await APIModelResource("m", spec).generate_async([])
    assert talker.sent < BUFFERS_MAX + CHAT_BYTES_MAX
