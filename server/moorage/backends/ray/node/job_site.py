"""Limits a job's Ray driver to its lease; `host` puts this file on the job's `PYTHONPATH`.

Python imports it as `sitecustomize` at its start. Ray gives drivers no placement group, so this
module makes the lease's group the driver's current group. The driver's tasks and actors then run in
this group. If a release of Ray does not allow this, `import ray` fails, since an unbound job would
take devices of others. This module needs only the standard library.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_WORKER = "ray._private.worker"
_PROPERTIES = ("placement_group_id", "should_capture_child_tasks_in_placement_group")


class _Finder:
    """Import hook: binds the job's driver to its lease when Ray's worker module is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name != _WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_patch(module: ModuleType) -> None:
                load(module)
                _bind(module)

            loader.exec_module = load_and_patch
        return spec


def _bind(module: ModuleType) -> None:
    kind = module.Worker
    if not all(isinstance(getattr(kind, name, None), property) for name in _PROPERTIES):
        raise ImportError("a job of Moorage cannot be bound to its lease under this release of Ray")
    from ray._raylet import PlacementGroupID  # noqa: PLC0415  # Ray is loaded now.

    group = PlacementGroupID(bytes.fromhex(os.environ["MOORAGE_RAY_GROUP"]))
    for name, value in zip(_PROPERTIES, (group, True), strict=True):
        setattr(kind, name, _bound(getattr(kind, name), value, module.SCRIPT_MODE))


def _bound(known: property, value: object, driver: int) -> property:
    def get(worker: Any) -> object:
        return value if worker.mode == driver else known.__get__(worker)

    return property(get)


def _go_on() -> None:
    """Import the environment's own `sitecustomize`, which this file hides."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # `pathlib` is slow to import.
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != here]  # noqa: PTH100  # As above.
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


if "MOORAGE_RAY_GROUP" in os.environ:
    sys.meta_path.insert(0, _Finder())
_go_on()
