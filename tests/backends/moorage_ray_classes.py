"""Classes of a user, which only the nodes of the Ray cluster can import."""

import os
import sys
import time


class Counter:
    """An actor that adds numbers and reports which devices it sees."""

    def __init__(self, start=0, *, seconds=0.0, fail=""):
        print("counts from", start)
        time.sleep(seconds)  # The actor's work.
        if fail:
            raise ValueError(fail)
        self.value = start
        self.seen = os.environ.get("CUDA_VISIBLE_DEVICES")

    def add(self, amount):
        self.value += amount
        print("has", self.value, file=sys.stderr)
        return self.value

    async def later(self, amount):
        return self.add(amount)

    def devices(self):
        return self.seen, os.environ.get("MOORAGE_LEASE_ID")
