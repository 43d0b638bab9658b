"""Tests of frames that are split at any place, and of frames that policies forge."""

import random

import msgspec
import pytest

from moorage.sandbox.wire import frames


@pytest.mark.parametrize("seed", range(30))
def test_a_stream_in_any_pieces_gives_the_same_frames(seed):
    rng = random.Random(seed)
    sent = [rng.randbytes(rng.choice([1, 3, 10, 1000, 70_000])) for _ in range(30)]
    stream = b"".join(frames.HEADER.pack(len(body)) + body for body in sent)
    reader = frames.FrameReader(100_000)
    received = []
    start = 0
    while start < len(stream):
        size = rng.choice([1, 2, 3, 5, 100, 65_536])
        received += reader.feed(stream[start : start + size])
        start += size
    assert received == sent
    assert not reader.error
    assert reader.missing == 0


@pytest.mark.parametrize("header", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x65\0\0\0"])
def test_frames_before_a_bad_header_are_read_and_frames_after_it_are_not(header):
    reader = frames.FrameReader(100)
    assert reader.feed(frames.HEADER.pack(1) + b"a" + header + b"bcd") == [b"a"]
    assert reader.error
    assert reader.feed(frames.HEADER.pack(1) + b"a") == []
    split = frames.FrameReader(100)
    assert split.feed(header[:2]) == []
    assert split.feed(header[2:]) == []
    assert split.error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        b"\x90",
        b"\x91\xcd\xff\xff",
        b"\x95\x14\xa1x\xc4\x00\xc0\xa0",
        b"\x94\x14\x01\xc4\x00\xc0",
        b"\x96\x14\x01\xc4\x00\xc0\xa0\xa0",
        b"\x94\x03\x01\xa1x\xc0",
        b"\x91" * 100_000 + b"\x01",
    ],
)
def test_a_cell_cannot_send_anything_but_its_own_frames(body):
    with pytest.raises((msgspec.MsgspecError, RecursionError)):
        frames.decode_from_cell(body)


def test_frames_are_the_same_after_encoding_and_decoding():
    sent = frames.Result((1 << 64) - 1, b"{}", b"\x80", "text")
    body = frames.pack(sent)[frames.HEADER.size :]
    assert frames.decode_from_cell(body) == sent
