"""The kind `kubernetes`, for the registry."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from moorage.backends.registry import BackendKind, Inventory, Surroundings
from moorage.setting_kinds import FILE, NAME_CHARS_MAX, Setting, SettingKind, read_list

if TYPE_CHECKING:
    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec

_CLUSTER_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*", re.ASCII)
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def _read_clusters(value: object) -> dict[str, str]:
    """Return the kubeconfig context of each cluster id; the default id is the context's name."""
    if isinstance(value, Mapping):
        pairs = [(name, context) for name, context in value.items()]
    else:
        parts = [(each, each.rpartition("=")) for each in read_list(value)]
        pairs = [(name or each, context) for each, (name, _, context) in parts]
    for name, context in pairs:
        if not isinstance(context, str) or not context or name == "query":
            raise ValueError
        if len(name) > NAME_CHARS_MAX or not _CLUSTER_ID.fullmatch(name):
            raise ValueError
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


def _read_namespace(value: object) -> str:
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value.replace("{tenant}", "t")):
        raise ValueError
    return value


CLUSTERS: Final = SettingKind(
    "`CONTEXT` or `CLUSTER_ID=CONTEXT`, separated by commas (in the file a list or a table)",
    _read_clusters,
)
NAMESPACE: Final = SettingKind(
    "a name of small letters, digits and dashes, with or without `{tenant}`", _read_namespace
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """The settings of the kind `kubernetes`: its clusters, and the namespace of pods."""

    kubernetes_clusters: Annotated[
        Mapping[str, str],
        Setting(
            CLUSTERS,
            "Kubernetes clusters to follow: contexts of the kubeconfig, or `in-cluster` for the "
            "cluster that the daemon runs in. Needs `pip install '.[kubernetes]'` in a checkout.",
            default="none",
        ),
    ] = field(default_factory=dict)
    kubernetes_config: Annotated[
        Path | None,
        Setting(
            FILE, "The kubeconfig.", default="the files in `KUBECONFIG`, else `~/.kube/config`"
        ),
    ] = None
    kubernetes_namespace: Annotated[
        str,
        Setting(
            NAMESPACE,
            "Namespace of the pods of leases; `{tenant}` in it stands for the tenant. It must "
            "exist: the daemon does not create it.",
        ),
    ] = "default"


class KubernetesKind(BackendKind[KubernetesSettings]):
    """Starts pods in Kubernetes clusters, and follows the capacity of these clusters."""

    name = "kubernetes"
    about = "`kubernetes` starts pods in `kubernetes_clusters`."
    settings = KubernetesSettings
    extra = "kubernetes"
    package = "kubernetes"
    engine_names = ("kubernetes", "k8s")

    def open(self, settings: KubernetesSettings, surroundings: Surroundings) -> "Backend":
        from moorage.backends.base import BackendError  # noqa: PLC0415  # See registry.
        from moorage.backends.kubernetes.backend import KubernetesBackend  # noqa: PLC0415  # It needs an extra.
        from moorage.backends.kubernetes.errors import KubernetesError  # noqa: PLC0415  # As above.
        from moorage.backends.kubernetes.following import ClusterSource  # noqa: PLC0415  # As above.
        from moorage.backends.kubernetes.identity import take_common_name  # noqa: PLC0415  # As above.

        clusters = [
            ClusterSource(cluster, context, settings.kubernetes_config)
            for cluster, context in settings.kubernetes_clusters.items()
        ]
        folder = surroundings.data_dir / self.name
        if clusters and surroundings.names is not None:
            try:
                take_common_name(folder, partial(surroundings.names.agree, self.name))
            except KubernetesError as error:
                raise BackendError(str(error)) from error
        return KubernetesBackend(folder, clusters, settings.kubernetes_namespace)

    def open_alone(self, folder: Path, environment: Mapping[str, str]) -> "Backend":
        """Open a backend on the cluster of `KUBECONFIG`, or on the cluster of this pod."""
        from moorage.backends.kubernetes.backend import KubernetesBackend  # noqa: PLC0415  # It needs an extra.
        from moorage.backends.kubernetes.following import ClusterSource  # noqa: PLC0415  # As above.

        file = environment.get("KUBECONFIG") or environment.get("MOORAGE_KUBERNETES_CONFIG")
        source = ClusterSource(self.name, kubeconfig=Path(file) if file else None)
        namespace = environment.get("MOORAGE_KUBERNETES_NAMESPACE", "default")
        return KubernetesBackend(folder, [source], namespace)

    def specs(self) -> "tuple[type[BaseResourceSpec], ...]":
        from moorage.backends.kubernetes.specs import (  # noqa: PLC0415  # See registry.
            JobResourceSpec,
            PodResourceSpec,
            PodServiceResourceSpec,
        )

        return PodResourceSpec, JobResourceSpec, PodServiceResourceSpec

    def follow(
        self, settings: KubernetesSettings, backend: "Backend | None", inventory: Inventory
    ) -> None:
        del backend  # Clusters are followed even without the backend.
        if not settings.kubernetes_clusters:
            return
        try:
            from moorage.backends.kubernetes.registration import FollowedClusters  # noqa: PLC0415  # As above.
        except ModuleNotFoundError as error:
            from moorage.backends.base import BackendError  # noqa: PLC0415  # As above.

            way = f"{self.install_command}, or remove the setting kubernetes_clusters"
            raise BackendError(f"following clusters needs {error.name}: {way}") from error
        contexts, kubeconfig = settings.kubernetes_clusters, settings.kubernetes_config
        FollowedClusters(contexts, kubeconfig, inventory).start()


KIND: Final = KubernetesKind()
