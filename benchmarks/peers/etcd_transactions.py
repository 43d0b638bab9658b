"""The peer etcd: a lease and a create-if-absent transaction for each GPU, in random order."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.servers import find_program, folder, free_port, library, program, version_of
from benchmarks.peers.session import Peer, Probes, devices
from moorage.bench.placements import CONNECTIONS, Booking, Nodes

LEASE_SECONDS: Final = 3_600
_PREFIX: Final = b"gpu/"
_AFTER_PREFIX: Final = b"gpu0"
_BUILT: Final = f"{Path.home()}/.cache/moorage-tests/kubernetes/etcd-*/etcd"

Value = int | bytes


def encode(*fields: tuple[int, Value]) -> bytes:
    """Return a message of Protocol Buffers with the given fields, as pairs of number and value."""
    return b"".join(
        _varint(number << 3) + _varint(value)
        if isinstance(value, int)
        else _varint(number << 3 | 2) + _varint(len(value)) + value
        for number, value in fields
    )


def decode(message: bytes) -> dict[int, list[Any]]:
    """Return the values of a Protocol Buffers message by field number."""
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if tag & 7 == 2:  # noqa: PLR2004  # Bytes, as the format has it.
            fields[tag >> 3].append(message[at : at + value])
            at += value
        else:
            fields[tag >> 3].append(value)
    return fields


def _varint(value: int) -> bytes:
    octets = bytearray()
    while value > 127:  # noqa: PLR2004  # Seven bits in each octet.
        octets.append(value & 127 | 128)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in itertools.count(0, 7):
        octet = message[at]
        at += 1
        value |= (octet & 127) << shift
        if octet < 128:  # noqa: PLR2004  # The last byte.
            break
    return value, at


class _Session:
    def __init__(self, pid: int, channels: list[Any], nodes: Nodes) -> None:
        self.pids = [pid]
        self._gpus = devices(nodes)
        self._keys = [_PREFIX + f"{node}:{number}".encode() for node, number in self._gpus]
        self._probes = Probes(len(self._keys))
        self._free: list[int] = []
        """GPUs that were free when all keys were last read, and that were not tried since."""

        def calls(path: str) -> Callable[[bytes], Any]:
            turns: Iterator[Any] = itertools.cycle(each.unary_unary(path) for each in channels)

            def call(message: bytes) -> Any:
                return next(turns)(message)

            return call

        self._grant = calls("/etcdserverpb.Lease/LeaseGrant")
        self._revoke = calls("/etcdserverpb.Lease/LeaseRevoke")
        self._txn = calls("/etcdserverpb.KV/Txn")
        self._range = calls("/etcdserverpb.KV/Range")
        self._watch = channels[0].stream_stream("/etcdserverpb.Watch/Watch")

    async def place(self) -> Booking | None:
        (lease,) = decode(await self._grant(encode((1, LEASE_SECONDS))))[2]
        for place in self._probes():
            if await self._create(place, lease):
                return Booking(lease, *self._gpus[place])
        while free := self._free or await self._find_free():
            self._free = free
            place = free.pop()
            if await self._create(place, lease):
                return Booking(lease, *self._gpus[place])
        await self._revoke(encode((1, lease)))
        return None

    async def _create(self, place: int, lease: int) -> bool:
        key = self._keys[place]
        absent = encode((2, 1), (3, key), (5, 0))  # Created at revision 0.
        put = encode((2, encode((1, key), (2, b"held"), (3, lease))))
        answer = decode(await self._txn(encode((1, absent), (2, put))))
        return bool(answer.get(2))

    async def _find_free(self) -> list[int]:
        query = encode((1, _PREFIX), (2, _AFTER_PREFIX), (8, 1))
        held = {decode(each)[1][0] for each in decode(await self._range(query))[2]}
        free = [place for place, key in enumerate(self._keys) if key not in held]
        return self._probes.shuffled(free)

    async def release(self, booking: Booking) -> None:
        await self._revoke(encode((1, booking.handle)))

    async def wait(self, parked: asyncio.Event) -> Booking:
        stream = self._watch()
        create = encode((1, _PREFIX), (2, _AFTER_PREFIX), (5, 0))  # No puts.
        await stream.write(encode((1, create)))
        try:
            await stream.read()  # From this answer on, the watch is active.
            booking = await self.place()
            while booking is None:
                parked.set()
                events = decode(await stream.read())[11]
                (lease,) = decode(await self._grant(encode((1, LEASE_SECONDS))))[2]
                for event in events:
                    key = decode(decode(event)[2][0])[1][0]
                    place = self._keys.index(key)
                    if await self._create(place, lease):
                        booking = Booking(lease, *self._gpus[place])
                        break
            return booking
        finally:
            stream.cancel()


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    import grpc.aio  # noqa: PLC0415  # This peer's alone.

    path = _program()
    assert path is not None
    port, peer = free_port(), free_port()
    with folder() as home:
        url, other = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        flags = [f"--data-dir={home / 'data'}", f"--listen-client-urls={url}"]
        flags += [f"--advertise-client-urls={url}", f"--listen-peer-urls={other}"]
        flags += [f"--initial-advertise-peer-urls={other}", f"--initial-cluster=default={other}"]
        async with (
            program([path, *flags], port, home / "log") as pid,
            contextlib.AsyncExitStack() as stack,
        ):
            own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own)
                )
                for _ in range(CONNECTIONS)
            ]
            ready = channels[0].unary_unary("/etcdserverpb.Maintenance/Status")
            await ready(b"", wait_for_ready=True)
            yield _Session(pid, channels, nodes)


def _program() -> str | None:
    return find_program("etcd", _BUILT)


PEER: Final = Peer(
    name="etcd",
    group="home-made",
    title="etcd, transactions",
    decides="any free GPU; expiry",
    stores="yes, synced",
    install="apt-get install etcd-server; pip install grpcio",
    version=lambda: version_of(_program()) if library("grpcio") else None,
    run=_run,
)
