"""Which engines this daemon has: those that the setting `backends` names."""

from collections.abc import Callable

from moorage.config import Config
from moorage.engines.base import Engine
from moorage.engines.local.engine import LocalEngine, this_node
from moorage.engines.memory import MemoryEngine


def backends(config: Config) -> dict[str, Engine]:
    """Return the engines that are switched on, by name."""
    made: dict[str, Callable[[], Engine]] = {
        "local": lambda: LocalEngine(
            config.data_dir / "local", config.local_nodes or (this_node(), "localhost")
        ),
        "memory": MemoryEngine,
    }
    return {name: made[name]() for name in config.backends}
