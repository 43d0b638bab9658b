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
        instance_type: E.g. `g5.xlarge`; by default the cheapest that has what the spec wants.
        gpus: Smallest number, where no type is given.
        gpu_model: Of this model, as `A100` or `A100-80GB`, where no type is given.
        cpu_count: Smallest number, where no type is given.
        mem_limit: Smallest memory, where no type is given.
        image_id: What it boots; Amazon Linux 2023, or with GPUs AWS's Ubuntu with their driver,
            where not given.
        region: Where; that of the credentials where not given.
        zones: In the order they are tried; all of the region where empty.
        subnets: Zone -> subnet; the default ones where empty.
        security_groups: Ids.
        key_name: Of the SSH key pair.
        instance_profile: Name or ARN.
        user_data: Run at the first boot. A shell script finds the lease in its environment.
        volume_gib: Of the root volume; the image's own where not given.
        spot: Try the spot market first.
        on_demand_fallback: Where the spot market has none.
        max_price_per_hour: In USD; offers above it, or of which no price is known, are passed over.
        readiness_port: It is ready when a connection to it succeeds; None waits for the status
            checks of AWS instead, which take minutes.
        tags: Its own, beside those that Moorage sets.
        start_timeout: Seconds until it must be ready.
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
