"""The answer to "could this ever fit?"."""


class Outcome:
    """Says whether a request is possible, and if not, why. The truth value is `ok`.

    Args:
        ok: Whether the request is possible; None: True if `reason` is empty.
        reason: Why the request is impossible, for a person.

    Raises:
        ValueError: `ok` is False, and `reason` is empty.
    """

    __slots__ = ("ok", "reason")

    def __init__(self, ok: bool | None = None, reason: str | None = None) -> None:
        if ok is None:
            ok = not reason
        if not ok and not reason:
            raise ValueError(f"{type(self).__name__}(False) requires a reason")
        self.ok = bool(ok)
        self.reason: str | None = reason

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        state = "ok" if self.ok else "fail"
        return f"<{type(self).__name__} {state}{f': {self.reason}' if self.reason else ''}>"
