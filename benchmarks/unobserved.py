"""Runs `moored` so that signals switch its request metrics and audit log on and off.

The benchmark `observation` uses it. No setting switches metrics off, so this module puts silent
observers in the place of the real ones. Both kinds of blocks run in one process, since two
processes with the same program differ by some percent in processor time.
"""

import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

from moorage.commands.program import run
from moorage.daemon.effects import EffectCarrier

WITHOUT: Final = signal.SIGUSR1
WITH: Final = signal.SIGUSR2
AUDIT_THREAD: Final = "audit"
"""Name, for the kernel, of the thread that writes the audit log."""


class _Silent:
    """Takes the calls of the observers and does nothing."""

    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests = 0

    def observe_step(self, event: object, turn: object) -> None:
        pass

    def observe_commit(self, first: object, last: object = None) -> None:
        pass

    def observe_facts(self, facts: object) -> None:
        pass

    def observe_decision(self, event: object, seconds: object) -> None:
        pass

    def observe_consultation(self, effect: object) -> None:
        pass

    def forget_consultation(self, request: object) -> None:
        pass

    def count(self, answer: object) -> None:
        pass


class _Switch:
    """Exchanges the observers of the running server, at a signal."""

    def __init__(self) -> None:
        self._carrier: EffectCarrier | None = None
        self._kinds: dict[int, dict[str, object]] = {}
        begin = EffectCarrier.__init__

        def note(carrier: EffectCarrier, *parts: Any) -> None:
            begin(carrier, *parts)
            names = ("trail", "measures", "durations")
            self._carrier = carrier
            self._kinds[WITH] = {name: getattr(carrier, name) for name in names}
            self._kinds[WITHOUT] = dict.fromkeys(names, _Silent())
            for each in threading.enumerate():
                if each.name == AUDIT_THREAD:  # Python before 3.14 names threads only for itself.
                    Path(f"/proc/self/task/{each.native_id}/comm").write_text(AUDIT_THREAD)

        EffectCarrier.__init__ = note  # type: ignore[assignment]  # It takes the same arguments.

    def turn(self, number: int, _: object) -> None:
        for name, observer in self._kinds[number].items():
            object.__setattr__(self._carrier, name, observer)


if __name__ == "__main__":
    switch = _Switch()
    for each in (WITHOUT, WITH):
        signal.signal(each, switch.turn)
    sys.exit(run())
