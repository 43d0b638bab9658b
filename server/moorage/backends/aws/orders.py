"""Finds regions, zones, types and image for an order. Makes no call to AWS.

The spec's own fields come first. The leased node supplies missing ones: its labels name the
instance type, region, zone and market. If the node names no type, the cheapest type with the
lease's resources is taken. So a cluster document can describe capacity at AWS that is rented only
when a lease starts a workload there.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moorage.backends.aws.catalogue import Catalogue, InstanceType
from moorage.backends.aws.instances import CONTAINER, SERVER, WORKLOAD
from moorage.backends.aws.specs import InstanceResourceSpec
from moorage.backends.base import BackendError, BackendUnavailableError, Order, UnsupportedSpecError
from moorage.backends.spec_fields import memory_bytes
from moorage.backends.specs import ContainerResourceSpec
from moorage.model import Node, Share
from moorage.policy import capacity_type
from moorage.records.json_values import JsonObject

LABELS: Final = {
    "type": "node.kubernetes.io/instance-type",
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
}
"""Labels of a node with its type and place at AWS: well-known labels of Kubernetes."""
TYPES_TRIED_MAX: Final = 5
"""Maximum instance types that one start tries, the cheapest first, if the spec names none."""
USER_DATA_BYTES_MAX: Final = 16 * 1024
TAGS_MAX: Final = 40
"""Maximum tags that a user may set; AWS allows 50, and this backend needs some."""
TAG_VALUE_CHARS_MAX: Final = 256
_OURS: Final = ("aws:", "moorage:")
_SHELLS: Final = ("#!/bin/sh", "#!/bin/bash", "#!/usr/bin/env bash", "#!/usr/bin/env sh")
_IMAGE_CPU: Final = (
    "resolve:ssm:/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64",
    "/dev/xvda",
)
_IMAGE_GPU: Final = (
    (
        "resolve:ssm:/aws/service/deeplearning/ami/x86_64/"
        "base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    ),
    "/dev/sda1",
)
"""Image and root device by default: Amazon Linux 2023, or with GPUs Ubuntu with NVIDIA's driver.

AWS finds the newest version of each image.
"""
_NO_OPEN_DRIVER: Final = frozenset({"V100", "K80", "M60"})
"""GPU models that NVIDIA's open driver does not support."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An instance type in a market.

    Args:
        type: Name of the instance type.
        spot: Whether to rent it on the spot market; False: on demand.
        known: The type's entry in the catalogue; None: no entry.
    """

    type: str
    spot: bool
    known: InstanceType | None

    @property
    def title(self) -> str:
        """The offer in messages: type and market."""
        return f"{self.type} {'spot' if self.spot else 'on demand'}"


def check(spec: InstanceResourceSpec) -> None:
    """Refuse a spec that AWS could never start.

    Raises:
        UnsupportedSpecError: AWS could never start it; the message names the field.
    """
    if any(key.startswith(_OURS) for key in spec.tags):
        raise UnsupportedSpecError("tags: expected keys that start with neither aws: nor moorage:")
    if len(spec.tags) > TAGS_MAX:
        raise UnsupportedSpecError(f"tags: expected at most {TAGS_MAX} tags")
    if len((spec.user_data or "").encode()) > USER_DATA_BYTES_MAX:
        raise UnsupportedSpecError(f"user_data: expected at most {USER_DATA_BYTES_MAX} bytes")


def region_of(spec: InstanceResourceSpec, node: Node | None, default: str | None) -> str:
    """Return the region in which to run an instance.

    Raises:
        BackendUnavailableError: No region is known.
    """
    region = spec.region or (node.labels.get(LABELS["region"]) if node else None) or default
    if not region:
        label = LABELS["region"]
        ways = f"spec.region, the node's label {label}, or AWS_DEFAULT_REGION of the server"
        raise BackendUnavailableError(f"no AWS region is given: expected {ways}")
    return region


def zones_of(spec: InstanceResourceSpec, node: Node | None) -> list[str]:
    """Return the zones that the spec or the node names, in order; empty: all."""
    if spec.zones or spec.subnets:
        return list(spec.zones or spec.subnets)
    zone = node.labels.get(LABELS["zone"]) if node and not spec.region else None
    return [zone] if zone else []


def offers(
    spec: InstanceResourceSpec,
    share: Share | None,
    node: Node | None,
    catalogue: Catalogue,
    region: str,
) -> list[Offer]:
    """Return the offers to try, in order: the spot market first if the spec wants it.

    Raises:
        BackendError: No type has the wanted resources at a price up to the spec's maximum.
    """
    priced = catalogue.of(region)
    types = _types(spec, share, node, catalogue)
    spot = spec.spot or (node is not None and capacity_type(node.labels) == "spot")
    markets = (True, False) if spot and spec.on_demand_fallback else (spot,)
    all_of_them = [Offer(name, spot, priced.find(name)) for spot in markets for name in types]
    limit = spec.max_price_per_hour
    affordable = [
        each for each in all_of_them if limit is None or each.spot or _costs(each) <= limit
    ]
    if not affordable:
        prices = ", ".join(f"{each.type} {_price(each)}" for each in all_of_them)
        hint = f" Prices of {region} are not known here: moored prices --region {region}."
        unknown = any(_costs(each) == float("inf") for each in all_of_them)
        raise BackendError(
            f"max_price_per_hour: expected at least the price of one of {prices}."
            f"{hint if unknown else ''}"
        )
    return affordable


def _costs(offer: Offer) -> float:
    """Return the price on demand; an unknown price counts as infinite."""
    price = offer.known.usd_per_hour if offer.known else None
    return float("inf") if price is None else price


def _price(offer: Offer) -> str:
    costs = _costs(offer)
    return "(price not known)" if costs == float("inf") else f"at {costs:g} USD"


def _types(
    spec: InstanceResourceSpec, share: Share | None, node: Node | None, catalogue: Catalogue
) -> list[str]:
    if spec.instance_type:
        return [spec.instance_type]
    sized = spec.gpus or spec.gpu_model or spec.cpu_count or spec.mem_limit
    label = node.labels.get(LABELS["type"]) if node else None
    if label and not sized:
        return [label]
    if sized or share is None:
        memory = memory_bytes(spec.mem_limit) / (1 << 20) if spec.mem_limit else 0
        wanted: JsonObject = {
            "vcpus": spec.cpu_count or 0,
            "memory_mib": memory,
            "gpus": spec.gpus,
            "gpu_model": spec.gpu_model or "",
        }
    else:
        held = [gpu for gpu in (node.gpus if node else ()) if gpu.id in share.gpus]
        wanted = {
            "vcpus": share.cpu_milli / 1000,
            "memory_mib": share.memory_mib,
            "gpus": len(share.gpus),
            "gpu_model": held[0].model if held else "",
        }
    fit = catalogue.fitting(**wanted)
    if not fit:
        requirements = ", ".join(
            f"{name} {value:g}" if not isinstance(value, str) else f"{name} {value}"
            for name, value in wanted.items()
            if value
        )
        raise BackendError(
            f"no instance type of the catalogue has {requirements}: give spec.instance_type"
        )
    return [each.name for each in fit[:TYPES_TRIED_MAX]]


def request(
    order: Order, spec: InstanceResourceSpec, offer: Offer, zone: str, server: str, turn: int
) -> JsonObject:
    """Return the arguments of RunInstances.

    The client token follows from the server, the workload's name, the turn, the offer and the zone.
    If AWS gets a token a second time, it answers with the instance of the first time.

    Args:
        order: The order to carry out.
        spec: The workload's spec.
        offer: The type and market to try.
        zone: The zone to try.
        server: The server's id, for the tag.
        turn: Number of earlier instances of this name that ended.

    Raises:
        BackendError: The type has no default image, and the spec names none.
    """
    image, device = _image(spec, offer)
    token = "|".join((server, order.id, str(turn), offer.title, zone))
    tags = {"Name": f"moorage {order.id}"[:TAG_VALUE_CHARS_MAX], **spec.tags}
    tags |= {SERVER: server, WORKLOAD: order.id}
    if isinstance(order.spec, ContainerResourceSpec):
        tags[CONTAINER] = "true"
    if lease := order.environment.get("MOORAGE_LEASE_ID"):
        tags["moorage:lease"] = lease
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    parameters: JsonObject = {
        "MinCount": 1,
        "MaxCount": 1,
        "InstanceType": offer.type,
        "ImageId": image,
        "ClientToken": hashlib.sha256(token.encode()).hexdigest(),
        "Placement": {"AvailabilityZone": zone},
        # An instance that shuts itself down is deleted, so that it costs nothing more.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required"},
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": listed} for kind in ("instance", "volume")
        ],
    }
    if offer.spot:
        limit = spec.max_price_per_hour
        options = {"MaxPrice": f"{limit:g}"} if limit is not None else {}
        parameters["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", **options},
        }
    if zone in spec.subnets:
        parameters["SubnetId"] = spec.subnets[zone]
    if spec.security_groups:
        parameters["SecurityGroupIds"] = list(spec.security_groups)
    if spec.key_name:
        parameters["KeyName"] = spec.key_name
    if profile := spec.instance_profile:
        parameters["IamInstanceProfile"] = {
            "Arn" if profile.startswith("arn:") else "Name": profile
        }
    if spec.user_data:
        parameters["UserData"] = _user_data(spec.user_data, order.environment)
    if spec.volume_gib:
        volume = {"VolumeSize": spec.volume_gib, "VolumeType": "gp3", "DeleteOnTermination": True}
        parameters["BlockDeviceMappings"] = [{"DeviceName": device, "Ebs": volume}]
    return parameters


def _image(spec: InstanceResourceSpec, offer: Offer) -> tuple[str, str]:
    """Return the image, and the name of its root device; empty if only AWS knows it."""
    if spec.image_id:
        return spec.image_id, ""
    known = offer.known
    if known is None or known.gpu_model in _NO_OPEN_DRIVER:
        raise BackendError(f"image_id: expected an image, since {offer.type} has no default image")
    return _IMAGE_GPU if known.gpus else _IMAGE_CPU


def _user_data(text: str, environment: Mapping[str, str]) -> str:
    """Export the lease's variables at the start of a shell script; leave other texts unchanged."""
    first, newline, rest = text.partition("\n")
    if not newline or not first.strip().startswith(_SHELLS):
        return text
    lines = [f"export {name}='{_quote(value)}'" for name, value in environment.items()]
    return "\n".join((first, *lines, rest))


def _quote(value: str) -> str:
    return value.replace("'", "'\\''")
