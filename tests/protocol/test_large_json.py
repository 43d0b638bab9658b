"""Large JSON decoded in short pieces gives the values and errors of a single pass."""

import gc
import random
import sys
import time

import msgspec
import pytest

from moorage.protocol.large_json import (
    LEVELS_MAX,
    PART_BYTES_MAX,
    decode_in_parts,
    encode_in_parts,
    is_large,
)


def random_value(chance, depth):
    kind = chance.randrange(8 if depth else 6)
    number = chance.randrange(-(2**63), 2**64)
    scalars = [None, True, number, chance.random(), 'é\u2028"\\' * 3, ""]
    if kind < len(scalars):
        return scalars[kind]
    below = [random_value(chance, depth - 1) for _ in range(chance.randrange(6))]
    return below if kind == 6 else {f"key {number} é": each for number, each in enumerate(below)}


@pytest.mark.parametrize("seed", range(5))
def test_chunked_decoding_agrees_with_one_pass(seed):
    chance = random.Random(seed)
    rows = [random_value(chance, 4) for _ in range(4000)]
    value = {"id": "c", "nodes": {"nodeData": rows}, "text": "x" * 2 * PART_BYTES_MAX}
    for encoded in (msgspec.json.encode(value), msgspec.json.format(msgspec.json.encode(value))):
        assert len(encoded) > 2 * PART_BYTES_MAX
        assert decode_in_parts(encoded) == msgspec.json.decode(encoded) == value


@pytest.mark.parametrize("encoded", [b"[]", b" 7 ", b'"x"', b"  " * PART_BYTES_MAX + b"{}"])
def test_small_values_with_much_white_space_are_decoded(encoded):
    assert decode_in_parts(encoded) == msgspec.json.decode(encoded)


def test_of_a_repeated_name_in_json_the_last_value_counts():
    long = b"1," * PART_BYTES_MAX + b"1"
    assert decode_in_parts(b'{"a":[' + long + b'],"a":2}') == {"a": 2}


def test_only_the_upper_levels_of_deep_values_are_split():
    deep = LEVELS_MAX * 20
    encoded = b"[" * deep + b'"' + b"x" * 2 * PART_BYTES_MAX + b'"' + b"]" * deep
    assert decode_in_parts(encoded) == msgspec.json.decode(encoded)


ROWS = b'{"id":"n","memory":1},' * 20_000
WRONG = {
    "cut": b'{"nodes":[' + ROWS,
    "in a part": b'{"nodes":[' + ROWS + b'{"id":nan}]}',
    "behind it": b'{"nodes":[' + ROWS + b"{}]} x",
    "no UTF-8": b'{"nodes":[' + ROWS + b'"\xff"]}',
    "half a surrogate": b'{"nodes":[' + ROWS + b'"\\ud800"]}',
    "too deep": b'{"nodes":[' + ROWS + b"[" * 100_000,
    "nothing": b" " * 3 * PART_BYTES_MAX,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_of_chunked_decoding_give_the_position_in_the_whole_text(wrong):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)) as whole:
        msgspec.json.decode(WRONG[wrong])
    with pytest.raises(whole.type) as parts:
        decode_in_parts(WRONG[wrong])
    assert str(parts.value) == str(whole.value)


def longest_call_seconds(decode, encoded):
    """Return the CPU time of the longest call into C, which no other thread interrupts."""
    longest = began = 0.0

    def note(_frame, event, _function):
        nonlocal longest, began
        if event == "c_call":
            began = time.thread_time()
        elif event == "c_return":
            longest = max(longest, time.thread_time() - began)

    sys.setprofile(note)
    try:
        decode(encoded)
    finally:
        sys.setprofile(None)
    return longest


def test_other_threads_run_while_large_json_is_decoded():
    """One call holds the interpreter's lock, so it must be a small part of the whole."""
    node = {"id": "node-1", "gpus": [{"modelName": "A100", "memory": 40960}] * 16}
    encoded = msgspec.json.encode({"nodes": {"nodeData": [node] * 5_000}})
    gc.disable()  # Garbage collections would disturb the measurement.
    try:
        ways = [(decode_in_parts, msgspec.json.decode)] * 3  # In turn: the machine may be busy.
        taken = [[longest_call_seconds(each, encoded) for each in pair] for pair in ways]
    finally:
        gc.enable()
    in_parts, whole = (min(each) for each in zip(*taken, strict=True))
    assert in_parts < whole / 2  # A tenth on most machines.


@pytest.mark.parametrize("seed", range(5))
def test_chunked_encoding_agrees_with_one_pass(seed):
    chance = random.Random(seed)
    rows = [random_value(chance, 4) for _ in range(4_000)]
    wide = {f"k{number}": random_value(chance, 2) for number in range(3_000)}
    value = {
        "id": "c",
        "nodes": {"nodeData": rows},
        "wide": wide,
        "text": "x" * 100_000,
        "none": [],
    }
    for each in (value, [value, 1, value], rows, wide, {}, [], None, {"": [[]] * 3_000}):
        assert b"".join(encode_in_parts(each)) == msgspec.json.encode(each)


def test_only_large_texts_are_decoded_in_chunks():
    assert not any(map(is_large, (None, "", [], {}, [1] * 100, {"a": {"b": ["c"]}})))
    assert all(map(is_large, ("x" * 200_000, [[1]] * 2_000, {"a": {"b": [{}] * 3_000}})))


def test_a_decoded_part_is_a_small_share_of_a_large_document():
    rows = [{"id": f"n{number}", "gpus": [{"memory": 81_920}] * 8} for number in range(5_000)]
    parts = list(encode_in_parts([{"id": "c", "nodes": {"nodeData": rows}}] * 3))
    assert max(map(len, parts)) <= 2 * PART_BYTES_MAX
