"""Turns a simulated world into a transcript, so that a failing seed can be stored as a test."""

import sys
from pathlib import Path

from simulated.world import Crashed, World

sys.path.append(str(Path(__file__).parents[2] / "transcripts"))

from storyteller import GRACE_SECONDS, Story, event_line  # From tests/transcripts.

from moorage.core.turns.events import Restarted  # As above.


def story_of(world: World, title: str) -> str:
    """Return the transcript of a world so far, with the core's present answers.

    A crash becomes `restart lost=N`, which includes the `Restarted` that follows it. A fault of the
    last command shows in the answer, or ends the transcript with the error.
    """
    story, blocks, clock, stored = Story(), [f"# {title}"], 0.0, 0
    for at, event in world.trace:
        if isinstance(event, Restarted):
            assert event.grace_seconds == GRACE_SECONDS
            command = f"restart lost={len(story.ledger) - stored}"
        elif isinstance(event, Crashed):
            stored = event.durable
            continue
        else:
            command = event_line(event)
        if at != clock:
            command, clock = f"@{at!r} {command}", at
        try:
            heard = story.tell(command)
        except Exception as error:  # noqa: BLE001  # Any error ends the transcript.
            heard = [f"# Here it broke: {error!r}"]
            blocks.append("\n".join([command, "----", *heard]))
            break
        blocks.append("\n".join([command, "----", *heard]))
    return "\n\n".join(blocks) + "\n"
