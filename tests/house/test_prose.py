"""Sentences name who acts: no source, page or message has words that leave this open."""

import re

import pytest

VAGUE = re.compile(r"(?<![a-z])(?:whoever|anew|nobody|somebody)(?![a-z])", re.IGNORECASE)
# `nobody` is also the name of a user, and tests use it as the name of a missing object.
NAME = re.compile(r"""NOBODY|(["'`])nobody\1|~nobody|"nobody[-:]|/nobody\b""")


def vague(line: str) -> bool:
    return bool(VAGUE.search(NAME.sub("", line)))


def test_sentences_have_a_subject(tree) -> None:
    found = [
        f"{each.name}:{number}: {line.strip()}"
        for each in tree
        if each.name != "tests/house/test_prose.py"
        for number, line in enumerate(each.lines, 1)
        if vague(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Nobody waits.", True),
        ('law(first, "nobody is served twice")', True),
        ("def test_somebody_waits():", True),
        ("Whoever's turn it is reads it anew.", True),
        ("It becomes user `nobody`.", False),
        ('ask("nobody:1-x")', False),
        ('get("/blocks/nobody")', False),
        ("os.setresuid(NOBODY, NOBODY, NOBODY)", False),
    ],
)
def test_vague_words_are_found(line: str, expected: bool) -> None:
    assert vague(line) is expected
