"""What may be looked at and not written, and what YAML writes as the dicts and lists that it is.

A pool hands out copies of what is free. To write into one would change nothing, so it is refused.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar

import yaml

__all__ = ["ADVICE", "Totals", "View", "in_yaml", "view_of"]

ADVICE: Final = (
    "this is a copy of what the pool has, and cannot be written; fill(), populate(), pop() and "
    "clear() change the pool, and getstate() returns a copy to write into"
)
_T = TypeVar("_T", bound=type)


def in_yaml(kind: _T) -> _T:
    """Have YAML write a kind of dict or list as what it is."""
    for name in ("SafeDumper", "Dumper", "CSafeDumper", "CDumper"):
        dumper = getattr(yaml, name, None)  # The last two need a library that may not be there.
        if dumper is not None and issubclass(kind, dict):
            dumper.add_representer(kind, lambda to, data: to.represent_dict(dict(data)))
        elif dumper is not None:
            dumper.add_representer(kind, lambda to, data: to.represent_list(list(data)))
    return kind


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(ADVICE)


@in_yaml
class View(dict[str, Any]):
    """A dict that cannot be written. A copy of it is a plain one."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy is made with."""
        return dict, (dict(self),)


@in_yaml
class _Rows(list[Any]):
    """A list that cannot be written. A copy of it is a plain one."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = _refuse
    pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy is made with."""
        return list, (list(self),)


@in_yaml
class Totals(Counter[str]):
    """A counter that cannot be written. A copy of it is a plain one.

    Args:
        totals: What it counts.

    """

    def __init__(self, totals: Mapping[str, int]) -> None:
        dict.update(self, totals)

    __setitem__ = __delitem__ = __ior__ = __iadd__ = __isub__ = _refuse
    clear = pop = popitem = setdefault = update = subtract = _refuse

    def copy(self) -> Counter[str]:  # type: ignore[override]  # A copy may be written.
        """Return one that can be written."""
        return Counter(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy is made with."""
        return Counter, (dict(self),)


def view_of(value: Any) -> Any:
    """Return plain data as something that cannot be written, all the way down."""
    if isinstance(value, dict):
        return View({name: view_of(each) for name, each in value.items()})
    return _Rows(view_of(each) for each in value) if isinstance(value, list) else value
