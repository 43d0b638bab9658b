"""The specs of the backend `aws`."""

from dataclasses import dataclass, field
from typing import Annotated

import pydantic

from moorage.backends.spec_fields import Count, Cpus, Memory, Name, Port, StartSeconds
from moorage.backends.specs import BaseResourceSpec

Price = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclass(kw_only=True)
class InstanceResourceSpec(BaseResourceSpec):
    """A virtual machine of a cloud.

    Args:
        instance_type: E.g. `g5.xlarge`; by default the cheapest with the wanted resources.
        gpus: Least number of GPUs, if no type is given.
        gpu_model: Model of the GPUs, as `A100` or `A100-80GB`, if no type is given.
        cpu_count: Least number of processors, if no type is given.
        mem_limit: Least memory, if no type is given.
        image_id: The image to boot; by default Amazon Linux 2023, or with GPUs AWS's Ubuntu with
            the GPU driver.
        region: By default the region of the credentials.
        zones: The zones to try, in order; empty: all zones of the region.
        subnets: Zone -> subnet; empty: the default subnets.
        security_groups: Ids of security groups.
        key_name: Name of the SSH key pair.
        instance_profile: Name or ARN of the instance profile.
        user_data: Text that runs at the first boot. A shell script gets the lease's variables.
        volume_gib: Size of the root volume; by default the image's own.
        spot: Whether to try the spot market first.
        on_demand_fallback: Whether to rent on demand if the spot market has no capacity.
        max_price_per_hour: The highest price in USD; offers with a higher or unknown price are
            skipped.
        readiness_port: The instance is ready when this port accepts a connection. None: when AWS's
            status checks pass, which takes minutes.
        tags: Further tags, beside those that Moorage sets.
        start_timeout: Seconds until the instance must be ready.
    """

    category: str = "instance"

    instance_type: Name | None = None
    gpus: Count = 0
    gpu_model: Name | None = None
    cpu_count: Cpus | None = None
    mem_limit: Memory | None = None
    image_id: Name | None = None
    region: Name | None = None
    zones: list[str] = field(default_factory=list[str])
    subnets: dict[str, str] = field(default_factory=dict[str, str])
    security_groups: list[str] = field(default_factory=list[str])
    key_name: Name | None = None
    instance_profile: Name | None = None
    user_data: str | None = None
    volume_gib: Annotated[int, pydantic.Field(ge=1, le=65_536)] | None = None
    spot: bool = False
    on_demand_fallback: bool = True
    max_price_per_hour: Price | None = None
    readiness_port: Port | None = None
    tags: dict[str, str] = field(default_factory=dict[str, str])
    start_timeout: StartSeconds | None = 600.0

    @property
    def title(self) -> str:
        """Return the instance type."""
        return self.instance_type or "cheapest"
