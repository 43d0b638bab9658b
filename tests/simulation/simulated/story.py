"""Turns a simulated world into a transcript, so that a failing seed can be stored as a test."""

import sys
from pathlib import Path

from simulated.world import Crashed, World

sys.path.append(str(Path(__file__).parents[2] / "transcripts"))

from storyteller import GRACE_SECONDS, Story, event_line  # It lies next door.

from moorage.core.turns.events import Restarted  # As above.


def story_of(world: World, title: str) -> str:
    """Return the transcript of a world so far, as the core plays it again.

    A crash becomes `restart lost=N`, which includes the `Restarted` that follows it. What the
    last command did wrong shows in the answer, or ends the story with the error.
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
        except Exception as error:  # noqa: BLE001  # Whatever it is, it is the story's end.
            heard = [f"# Here it broke: {error!r}"]
            blocks.append("\n".join([command, "----", *heard]))
            break
        blocks.append("\n".join([command, "----", *heard]))
    return "\n\n".join(blocks) + "\n"
