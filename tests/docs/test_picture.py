"""The recorded terminal in the README agrees with the output of the present commands."""

import html
import re

import pytest
from recording import PICTURE, play
from rich.text import Text

CHANGING = re.compile(r"\b[0-9a-f]{16}\b|\b\d+ (?:min|s)\b|─+")
"""Matches parts of the recording that may differ: ids and times of leases, and drawn lines."""


def letters(text: str) -> str:
    """Return the visible text, without white space and without parts that differ each time."""
    return "".join(CHANGING.sub("", text.replace("\xa0", " ")).split())


@pytest.mark.heavy  # A daemon, and four programs.
def test_the_picture_agrees_with_the_server() -> None:
    drawn: dict[float, list[tuple[float, str]]] = {}
    place = r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>'
    for left, top, text in re.findall(place, PICTURE.read_text()):
        drawn.setdefault(float(top), []).append((float(left), html.unescape(text)))
    shown = " ".join(text for top in sorted(drawn) for _, text in sorted(drawn[top]))
    said = "\n".join(f"$ {command}\n{Text.from_ansi(output).plain}" for command, output in play())
    assert letters(shown) == letters(said), "record it again: python tools/recording.py"
