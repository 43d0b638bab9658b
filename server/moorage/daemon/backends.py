"""Which engines this daemon has: those that the setting `backends` names."""

from collections.abc import Callable, Mapping

from moorage.config import Config
from moorage.engines.base import Engine, EngineError
from moorage.engines.local.engine import LocalEngine, this_node
from moorage.engines.memory import MemoryEngine
from moorage.model import Cluster, ClusterId, Node, Share

Clusters = Callable[[], Mapping[ClusterId, Cluster]]
"""Returns the inventory as it is now."""


def backends(config: Config, clusters: Clusters) -> dict[str, Engine]:
    """Return the engines that are switched on, by name.

    Args:
        config: All settings.
        clusters: For backends that look at the labels of a lease's node.

    Raises:
        EngineError: What a backend needs is not installed.

    """
    made: dict[str, Callable[[], Engine]] = {
        "local": lambda: LocalEngine(
            config.data_dir / "local",
            config.local_nodes or (this_node(), "localhost"),
            hidden=config.data_dir,
        ),
        "memory": MemoryEngine,
        "aws": lambda: _aws(config, clusters),
    }
    return {name: made[name]() for name in config.backends}


def _aws(config: Config, clusters: Clusters) -> Engine:
    try:
        from moorage.engines.aws.engine import AwsEngine  # noqa: PLC0415  # It needs an extra.
    except ModuleNotFoundError as error:
        way = "pip install 'moorage[aws]', or take aws out of the setting backends"
        raise EngineError(f"the backend aws needs {error.name}: {way}") from error

    def node(share: Share) -> Node | None:
        cluster = clusters().get(share.cluster_id)
        nodes = cluster.nodes if cluster else ()
        return next((each for each in nodes if each.id == share.node_id), None)

    return AwsEngine(config.data_dir / "aws", node)
