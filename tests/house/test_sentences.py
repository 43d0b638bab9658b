"""Nine of ten sentences of the pages have at most 30 words."""

import re

import pytest

WORDS_MAX = 30
SHARE = 0.9
CODE = re.compile(r"^```.*?^```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^\s*(?:[-*>]|\d+\.|#+)\s+")
END = re.compile(r"(?<=[.!?])[)”\"*_]*\s+")


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown page; cells, items and headings count as sentences."""
    parts, lines = [], []
    for line in [*CODE.sub("", text).splitlines(), ""]:
        if not line.strip() or MARK.match(line) or line.startswith("|"):
            parts.append(" ".join(lines))
            lines = []
        if line.startswith("|"):
            parts += re.split(r"(?<!\\)\|", line)
        elif line.strip():
            lines.append(MARK.sub("", line).strip())
    parts.append(" ".join(lines))
    return [each for part in parts for each in END.split(part) if re.search(r"[A-Za-z]", each)]


def ninth(found: list[str]) -> int:
    """Return the 90th percentile of the numbers of words."""
    counts = sorted(len(each.split()) for each in found)
    return counts[int(SHARE * (len(counts) - 1))]


def test_pages_are_in_short_sentences(tree) -> None:
    pages = [each for each in tree if each.name.endswith(".md")]
    assert len(pages) > 30
    long = {each.name: ninth(found) for each in pages if (found := sentences(each.text))}
    assert {name: words for name, words in long.items() if words > WORDS_MAX} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two three.\nFour", ["One.", "Two three.", "Four"]),
        ("- An item\n  goes on.\n- Another", ["An item goes on.", "Another"]),
        ("| a cell | its neighbour |\n|---|---|\n", ["a cell", "its neighbour"]),
        ("Text.\n\n```sh\nno prose at all\n```\nMore", ["Text.", "More"]),
    ],
)
def test_sentences_are_recognised(text: str, expected: list[str]) -> None:
    assert [each.strip() for each in sentences(text)] == expected
