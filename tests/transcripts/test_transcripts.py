"""Transcripts of the core; `storyteller` explains their language.

`MOORAGE_TRANSCRIPTS=write pytest tests/transcripts` stores the core's present answers. Read the
difference before you commit it: a person must judge the answers to be right.
"""

import os
from pathlib import Path

import pytest
from storyteller import Story

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
WRITE = os.environ.get("MOORAGE_TRANSCRIPTS") == "write"


def retold(text: str) -> str:
    """Play the commands of a transcript; return it with the core's present answers."""
    story, blocks = Story(), []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        spoken = [line for line in lines if not line.startswith("#")]
        if spoken:
            command = spoken[0]
            blocks.append("\n".join([*comments, command, "----", *story.tell(command)]))
        else:
            blocks.append("\n".join(comments))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_core_answers_as_in_the_transcript(path: Path) -> None:
    text = path.read_text()
    answer = retold(text)
    if WRITE:
        path.write_text(answer)
    else:
        assert answer == text


def test_the_folder_has_transcripts() -> None:
    assert len(STORIES) >= 12
