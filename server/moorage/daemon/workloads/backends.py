"""Which backends this daemon has: those that the setting `backends` names."""

import importlib.util
from collections.abc import Callable, Mapping

from moorage.backends.base import Backend, BackendError
from moorage.backends.local.backend import LocalBackend
from moorage.backends.local.machine import names_of
from moorage.backends.memory import MemoryBackend
from moorage.backends.ray.backend import RayBackend
from moorage.config.settings import Config
from moorage.extras import install_command
from moorage.model import Cluster, ClusterId, Node, Share

Clusters = Callable[[], Mapping[ClusterId, Cluster]]
"""Returns the inventory as it is now."""


def configured_backends(config: Config, clusters: Clusters) -> dict[str, Backend]:
    """Return the backends that are switched on, by name.

    Args:
        config: All settings.
        clusters: For backends that look at the labels of a lease's node.

    Raises:
        BackendError: What a backend needs is not installed.

    """
    made: dict[str, Callable[[], Backend]] = {
        "local": lambda: LocalBackend(
            config.data_dir / "local",
            config.local_nodes or names_of(config.data_dir / "local", clusters().values()),
            hidden=config.data_dir,
        ),
        "memory": MemoryBackend,
        "aws": lambda: _aws(config, clusters),
        "kubernetes": lambda: _kubernetes(config),
        "ray": lambda: _ray(config),
    }
    return {name: made[name]() for name in config.backends}


def _aws(config: Config, clusters: Clusters) -> Backend:
    try:
        from moorage.backends.aws.backend import AwsBackend  # noqa: PLC0415  # It needs an extra.
    except ModuleNotFoundError as error:
        way = f"{install_command('aws')}, or take aws out of the setting backends"
        raise BackendError(f"the backend aws needs {error.name}: {way}") from error

    def node(share: Share) -> Node | None:
        cluster = clusters().get(share.cluster_id)
        nodes = cluster.nodes if cluster else ()
        return next((each for each in nodes if each.id == share.node_id), None)

    open_to_all = not config.tokens  # Who is alone here is the operator.
    return AwsBackend(
        config.data_dir / "aws",
        node,
        profiles=config.aws_instance_profiles or (None if open_to_all else ()),
        groups=config.aws_security_groups or (None if open_to_all else ()),
    )


def _kubernetes(config: Config) -> Backend:
    try:
        from moorage.backends.kubernetes.backend import (  # noqa: PLC0415  # It needs an extra.
            KubernetesBackend,
        )
        from moorage.backends.kubernetes.following import (  # noqa: PLC0415  # As above.
            ClusterSource,
        )
    except ModuleNotFoundError as error:
        way = f"{install_command('kubernetes')}, or take kubernetes out of the setting backends"
        raise BackendError(f"the backend kubernetes needs {error.name}: {way}") from error
    clusters = [
        ClusterSource(cluster, context, config.kubernetes_config)
        for cluster, context in config.kubernetes_clusters.items()
    ]
    return KubernetesBackend(config.data_dir / "kubernetes", clusters, config.kubernetes_namespace)


def _ray(config: Config) -> Backend:
    if importlib.util.find_spec("ray") is None:  # Another process imports it.
        way = f"{install_command('ray')}, or take ray out of the setting backends"
        raise BackendError(f"the backend ray needs ray: {way}")
    return RayBackend(config.data_dir / "ray", config.ray_address)
