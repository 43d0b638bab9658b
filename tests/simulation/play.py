"""Plays seeds of the simulation: `play.py 17`, `play.py 0:200 --events 300 --digest`."""

import argparse
import hashlib
import sys
import time
from pathlib import Path

from simulated.story import story_of
from simulated.world import World, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", help="one seed, or FIRST:LAST+1")
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--digest", action="store_true", help="print a hash of all facts")
    parser.add_argument("--transcript", type=Path, help="write the last seed's story there")
    given = parser.parse_args()
    first, _, last = given.seeds.partition(":")
    digest, began, world = hashlib.sha256(), time.monotonic(), None
    for seed in range(int(first), int(last or int(first) + 1)):
        world = World(seed)
        try:
            world = run(seed, given.events, lambda _, world=world: world)
        finally:
            if given.transcript:
                given.transcript.write_text(story_of(world, f"Seed {seed} of the simulation."))
        digest.update(repr(world.ledger).encode())
    if given.digest:
        print(digest.hexdigest())
    print(f"{given.seeds} in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
