"""All errors of a pool, as one tree of classes; the package docstring shows the tree."""
# ruff: noqa: N818  # The documented names lack the suffix Error; only the root has it.


class SlotsError(Exception):
    """Root of every error that this package raises on purpose."""


class ResourceUnavailable(SlotsError):
    """The request does not fit now, or can never fit in this pool; `accommodates` says which."""


class EmptyResourcePoolError(SlotsError):
    """The pool has no types, for example because it was not filled."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "the resource pool is empty; fill() or populate() it first")


class UnknownResourceType(SlotsError, TypeError):
    """A request names a type that the pool does not have; documented as a `TypeError`.

    Args:
        type: The unknown type.
        known: The types of the pool.
    """

    def __init__(self, type: str, known: list[str]) -> None:  # noqa: A002  # The documents' word.
        super().__init__(
            f"Unknown resource requirement type {type!r}; the pool has {', '.join(known)}"
        )


class InvalidRequest(SlotsError, ValueError):
    """A request is malformed; the message names the member and the expectation."""


class UnevenNodes(ResourceUnavailable, InvalidRequest):
    """Nodes differ in a number that should be the same for all; the message has all numbers."""


class InvalidCheckin(SlotsError, ValueError):
    """The returned slots are not checked out in this pool; the checkin changed nothing."""


class InvalidSpecification(SlotsError, ValueError):
    """The description of a pool is wrong; the message names the wrong place."""


class SchemaMissingKeyError(InvalidSpecification):
    """The description of a flat pool has neither `resources` nor `local`, nor counts of types."""
