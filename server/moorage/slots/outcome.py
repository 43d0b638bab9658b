"""The answer to "could this ever fit?"."""


class Outcome:
    """Whether something is possible, and if not, why. Its truth value is `ok`.

    Args:
        ok: Whether it is possible; None: it is, unless there is a reason why not.
        reason: Why not, for a person.

    Raises:
        ValueError: It is not possible, without a reason.
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
