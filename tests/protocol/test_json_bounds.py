"""Tests of the count of a JSON text's values before the text is decoded."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moorage.model import Code
from moorage.protocol import json_bounds as bounds
from moorage.protocol.errors import BadMessage
from moorage.protocol.messages import AllocationRequest, decode, ignored_fields
from moorage.records import fields

MEBIBYTE = 2**20
HEAD = '{"adhoc":true,"policy_rule_uri":"first_fit:1","id":"a","inputs":'


def fill_mebibyte(before: str, unit: str, behind: str, between: str = ",") -> str:
    """Return a mebibyte of repeated JSON."""
    count = (MEBIBYTE - len(before) - len(behind)) // (len(unit) + len(between))
    return before + between.join([unit] * count) + behind


def number_mebibyte(before: str, unit: str, behind: str) -> str:
    count = (MEBIBYTE - len(before) - len(behind)) // (len(unit) + 5)
    return before + ",".join(unit % number for number in range(count)) + behind


MESSAGES = {
    "open brackets": "[" * MEBIBYTE,
    "open braces": '{"a":' * (MEBIBYTE // 5),
    "lists": fill_mebibyte(HEAD + '{"a":[', "[]", "]}}"),
    "objects": fill_mebibyte(HEAD + '{"a":[', "{}", "]}}"),
    "nested lists": fill_mebibyte(HEAD + '{"a":[', "[" * 100 + "]" * 100, "]}}"),
    "nested objects": fill_mebibyte(HEAD + '{"a":[', '{"a":' * 100 + "1" + "}" * 100, "]}}"),
    "names": number_mebibyte(HEAD + "{", '"%d":1', "}}"),
    "unknown fields": number_mebibyte(HEAD + "{},", '"%d":1', "}"),
    "one field again and again": fill_mebibyte(HEAD + "{},", '"inputs":{}', "}"),
    "fields of an operation": number_mebibyte('{"op":"release",', '"%d":1', "}"),
    "wrong value of an operation": fill_mebibyte('{"op":"release","lease":[', "[]", "]}"),
    "text": HEAD + '{"a":"' + "x" * (MEBIBYTE - 100) + '"}}',
    "escapes": HEAD + '{"a":"' + "\\u00e9" * (MEBIBYTE // 6 - 20) + '"}}',
    "half pairs": HEAD + '{"a":"' + "\\ud800" * (MEBIBYTE // 6 - 20) + '"}}',
    "brackets in texts": fill_mebibyte(HEAD + '{"a":[', '"[{"', "]}}"),
    "numbers": fill_mebibyte(HEAD + '{"a":[', "1", "]}}"),
    "numbers slow to read": fill_mebibyte(HEAD + '{"a":[', "1.7976931348623157e308", "]}}"),
    "exponents": fill_mebibyte(HEAD + '{"a":[', "1e290", "]}}"),
    "exponents with zeros": fill_mebibyte(HEAD + '{"a":[', "1E+00290", "]}}"),
    "numbers close to zero": fill_mebibyte(HEAD + '{"a":[', "0." + "0" * 310 + "1", "]}}"),
    "a number": HEAD + '{"a":' + "9" * MEBIBYTE + "}}",
    "numbers beyond 64 bits": fill_mebibyte(HEAD + '{"a":[', "9" * 30, "]}}"),
    "a number beyond 64 bits at the end": fill_mebibyte(
        HEAD + '{"a":[', "[]", "," + "9" * 30 + "]}}"
    ),
    "text that stops": fill_mebibyte(HEAD + '{"a":[', "[]", "]"),
    "alternatives": fill_mebibyte(HEAD + '{},"resources":{},"alternatives":[', "{}", "]}"),
}


def read(message: str) -> object:
    """Return a message, or why it is unreadable, as the gateway reads a frame."""
    try:
        request = decode(message)
        ignored_fields(message, request)
    except BadMessage as error:
        return error
    return request


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the shortest CPU time of three runs, in seconds."""
    best = 60.0
    for _ in range(3):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_a_mebibyte_is_read_or_refused_quickly(name: str) -> None:
    texts = fill_mebibyte('["', "x" * 16, '"]', '","')
    baseline = cpu_seconds(lambda: msgspec.json.decode(texts)) + 0.002
    assert cpu_seconds(lambda: read(MESSAGES[name])) < 8 * baseline


@pytest.mark.parametrize("name", ["lists", "names", "exponents", "alternatives"])
def test_a_message_with_too_many_parts_is_refused_with_its_id(name: str) -> None:
    error = read(MESSAGES[name])
    assert isinstance(error, BadMessage)
    assert (error.code, error.id) == (Code.TOO_LARGE, "a")
    assert error.expected in error.reason


def test_a_message_with_the_largest_allowed_number_of_parts_is_read() -> None:
    allowed = bounds.PARTS_MAX - 7  # Minus five named fields, and the objects around them.
    message = HEAD + json.dumps({"a": [[]] * (allowed - 1)}) + "}"
    assert isinstance(read(message), AllocationRequest)
    error = read(message.replace("[[]", "[[],[]", 1))
    assert isinstance(error, BadMessage)
    assert error.code is Code.TOO_LARGE


@pytest.mark.parametrize(
    "inputs",
    [
        {"json": json.dumps([{"a": [1, "x"]}] * 40_000)},
        {"csv": "1,2,3\n" * 100_000},
        {"times": ["2026-01-02T03:04:05Z"] * 30_000},
        {"hex": "e290" * 200_000},
        {"small": [1.25e-07] * 50_000},
    ],
    ids=["json", "csv", "times", "hex", "small"],
)
def test_brackets_within_strings_do_not_count_as_parts(inputs: dict[str, Any]) -> None:
    request = read(HEAD + json.dumps(inputs) + "}")
    assert isinstance(request, AllocationRequest)
    assert request.inputs == inputs


def random_value(chance: random.Random, levels: int) -> Any:
    if levels and chance.random() < 0.7:
        many = range(chance.randrange(5))
        if chance.random() < 0.5:
            return [random_value(chance, levels - 1) for _ in many]
        return {random_text(chance): random_value(chance, levels - 1) for _ in many}
    return chance.choice([None, True, 1, -2.5, random_text(chance)])


def random_text(chance: random.Random) -> str:
    return "".join(chance.choices('ab"\\[]{}:,é\n', k=chance.randrange(12)))


def parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts, value.values()))
    return 1 + sum(map(parts, value)) if isinstance(value, list) else 0


def depth(value: Any) -> int:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0)
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_of_parts_and_depth_agree_with_the_decoded_value(seed: int) -> None:
    chance = random.Random(seed)
    rows = [random_value(chance, 6) for _ in range(400 if seed % 4 else 4_000)]
    encoded = json.dumps(rows, ensure_ascii=chance.random() < 0.5).encode()
    assert bounds.has_more_parts(encoded, parts(rows) - 1)
    assert not bounds.has_more_parts(encoded, parts(rows))
    if parts(rows) < fields.DEPTH_MAX * 100:
        assert bounds.is_deeper(encoded, depth(rows) - 1)
    assert not bounds.is_deeper(encoded, depth(rows))
