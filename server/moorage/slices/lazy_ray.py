"""Imports Ray at its first use, so that this package can be imported without Ray."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Final

from moorage.slices.errors import RayMissingError
from moorage.slices.ray_values import RayValue

__all__ = ["RemoteClass", "ray"]

if TYPE_CHECKING:
    import ray
else:

    class _Ray:
        """A stand-in for the module `ray`, which is imported when an attribute is used."""

        def __getattr__(self, name: str) -> RayValue:
            if importlib.util.find_spec("ray") is None:
                raise RayMissingError
            return getattr(importlib.import_module("ray"), name)

    ray: Final = _Ray()


class RemoteClass:
    """Stands for an actor class of Ray; calls `ray.remote` only when an actor is started.

    Args:
        of: The class of the actors.
        options: Default options of its actors.
    """

    def __init__(self, of: type, **options: RayValue) -> None:
        self._of = of
        self._options = options
        self.__doc__ = of.__doc__

    def options(self, **options: RayValue) -> RayValue:
        """Return the class with other options, as Ray's `options` does."""
        return ray.remote(**self._options)(self._of).options(**options)

    def remote(self, *args: RayValue, **kwargs: RayValue) -> RayValue:
        """Start an actor, and return its handle."""
        return ray.remote(**self._options)(self._of).remote(*args, **kwargs)
