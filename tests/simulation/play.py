"""Plays seeds of the simulation: `play.py 17`, `play.py 0:200 --events 300 --digest`.

`play.py 0:200 --mutant "never ends a pause"` plays a mutant of the core until a law fails.
"""

import argparse
import hashlib
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from mutated.functions import play_mutant
from mutated.mutants import MUTANTS
from simulated.story import story_of
from simulated.world import EVENTS, World, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", help="one seed, or FIRST:LAST+1")
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--digest", action="store_true", help="print a hash of all facts")
    parser.add_argument("--transcript", type=Path, help="write the last seed's story there")
    mutants = {mutant.name: mutant for mutant in MUTANTS}
    parser.add_argument("--mutant", choices=mutants, metavar="NAME", help="play this one")
    given = parser.parse_args()
    mutant = mutants.get(given.mutant)
    with play_mutant(mutant.of, mutant.edit) if mutant else nullcontext():
        return play(given)


def play(given: argparse.Namespace) -> int:
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
