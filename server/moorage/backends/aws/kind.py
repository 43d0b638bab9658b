"""The kind `aws`, for the registry."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from moorage.backends.registry import BackendKind, Surroundings
from moorage.model import Node, Share
from moorage.setting_kinds import NAMES, Setting

if TYPE_CHECKING:
    from moorage.backends.base import Backend
    from moorage.backends.specs import BaseResourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings:
    """The settings that say which resources of the operator's account callers may use."""

    aws_instance_profiles: Annotated[
        tuple[str, ...],
        Setting(
            NAMES,
            "Values that specs of the backend `aws` may have as `instance_profile`: names or "
            "ARNs, spelled as in the specs. Without tokens any value is allowed; with tokens, "
            "only these.",
            default="none",
        ),
    ] = ()
    aws_security_groups: Annotated[
        tuple[str, ...],
        Setting(
            NAMES,
            "Ids that specs of the backend `aws` may have in `security_groups`. Without tokens "
            "any id is allowed; with tokens, only these.",
            default="none",
        ),
    ] = ()


class AwsKind(BackendKind[AwsSettings]):
    """Rents instances of Amazon EC2."""

    name = "aws"
    about = "`aws` rents instances of Amazon EC2, and needs `pip install '.[aws]'` in a checkout."
    settings = AwsSettings
    extra = "aws"
    package = "boto3"
    engine_names = ("aws",)

    def open(self, settings: AwsSettings, surroundings: Surroundings) -> "Backend":
        from moorage.backends.aws.backend import AwsBackend  # noqa: PLC0415  # It needs an extra.

        def node(share: Share) -> Node | None:
            cluster = surroundings.clusters().get(share.cluster_id)
            nodes = cluster.nodes if cluster else ()
            return next((each for each in nodes if each.id == share.node_id), None)

        unnamed = None if surroundings.alone else ()
        return AwsBackend(
            surroundings.data_dir / self.name,
            node,
            names=surroundings.names,
            profiles=settings.aws_instance_profiles or unnamed,
            groups=settings.aws_security_groups or unnamed,
        )

    def open_alone(self, folder: Path, environment: Mapping[str, str]) -> "Backend":
        """Open the backend with the credentials and the region that boto3 finds."""
        from moorage.backends.aws.backend import AwsBackend  # noqa: PLC0415  # It needs an extra.

        del environment  # boto3 reads the environment itself.
        return AwsBackend(folder)

    def specs(self) -> "tuple[type[BaseResourceSpec], ...]":
        from moorage.backends.aws.specs import InstanceResourceSpec  # noqa: PLC0415  # See registry.

        return (InstanceResourceSpec,)


KIND: Final = AwsKind()
