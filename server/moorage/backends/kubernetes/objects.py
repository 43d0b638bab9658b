"""The fields of Kubernetes objects that we read; decoding drops all others.

`records` makes records from them. Field names are those of the API.
"""

import msgspec

from moorage.records.json_values import JsonObject

Labels = dict[str, str]


class _Read(msgspec.Struct, frozen=True):
    """The base of all objects of this module; absent fields get their default."""


class ApiMeta(_Read, frozen=True, rename="camel"):
    """`metadata` of any object."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: Labels | None = None
    annotations: Labels | None = None


class ApiItem(_Read, frozen=True):
    """Any object; only its metadata is read."""

    metadata: ApiMeta = ApiMeta()


class ApiListMeta(
    _Read, frozen=True, rename={"resource_version": "resourceVersion", "token": "continue"}
):
    """`metadata` of a list: the version of the listed state, and the token of the next page."""

    resource_version: str = ""
    token: str = ""


class ApiPage(_Read, frozen=True):
    """One page of a list; its items are decoded one by one."""

    metadata: ApiListMeta = ApiListMeta()
    items: list[msgspec.Raw] | None = None


class ApiEvent(_Read, frozen=True):
    """One event of a watch."""

    type: str = ""
    object: msgspec.Raw = msgspec.Raw(b"{}")


class ApiStatus(_Read, frozen=True):
    """The `Status` object with which an API server refuses a call."""

    code: int = 0
    reason: str = ""
    message: str = ""


class ApiSizes(_Read, frozen=True):
    """`resources` of a container or a pod."""

    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class ApiContainer(_Read, frozen=True, rename="camel"):
    """A container; an init container with the restart policy `Always` is a sidecar."""

    resources: ApiSizes | None = None
    restart_policy: str = ""


class ApiPodSpec(_Read, frozen=True, rename="camel"):
    """A pod's `spec`: its node, and the resources that its containers request."""

    node_name: str = ""
    containers: list[ApiContainer] | None = None
    init_containers: list[ApiContainer] | None = None
    resources: ApiSizes | None = None
    overhead: dict[str, str | int] | None = None


class ApiPodStatus(_Read, frozen=True):
    """A pod's `status`."""

    phase: str = ""


class ApiPod(_Read, frozen=True):
    """A pod."""

    metadata: ApiMeta = ApiMeta()
    spec: ApiPodSpec = ApiPodSpec()
    status: ApiPodStatus = ApiPodStatus()


class ApiAttribute(_Read, frozen=True, rename={"text": "string", "number": "int", "flag": "bool"}):
    """The value of a device attribute; the field of its type is set."""

    text: str | None = None
    number: int | None = None
    flag: bool | None = None
    version: str | None = None


class ApiCapacity(_Read, frozen=True):
    """A capacity of a device, such as its memory."""

    value: str | int = 0


class ApiDeviceTaint(_Read, frozen=True):
    """A taint of a device: a reason not to use it."""

    effect: str = ""


class ApiDevice(_Read, frozen=True, rename="camel"):
    """A device that a DRA driver publishes."""

    name: str
    attributes: dict[str, ApiAttribute] | None = None
    capacity: dict[str, ApiCapacity] | None = None
    taints: list[ApiDeviceTaint] | None = None
    consumes_counters: list[JsonObject] | None = None


class ApiPool(_Read, frozen=True, rename="camel"):
    """The pool of a ResourceSlice: its name, its generation, and its number of slices."""

    name: str = ""
    generation: int = 0
    resource_slice_count: int = 1


class ApiSliceSpec(_Read, frozen=True, rename="camel"):
    """Devices of one driver; without a node name, several nodes can use them."""

    driver: str = ""
    node_name: str = ""
    pool: ApiPool = ApiPool()
    devices: list[ApiDevice] | None = None


class ApiResourceSlice(_Read, frozen=True):
    """A ResourceSlice: some devices of a pool."""

    metadata: ApiMeta = ApiMeta()
    spec: ApiSliceSpec = ApiSliceSpec()


class ApiResult(_Read, frozen=True, rename="camel"):
    """A device allocated to a claim; with `admin_access`, others can still get the device."""

    driver: str = ""
    pool: str = ""
    device: str = ""
    admin_access: bool = False


class ApiResults(_Read, frozen=True):
    """The list of devices allocated to a claim."""

    results: list[ApiResult] | None = None


class ApiAllocation(_Read, frozen=True):
    """The allocation of a claim."""

    devices: ApiResults | None = None


class ApiClaimStatus(_Read, frozen=True):
    """A claim's `status`; without an allocation, the claim has no devices yet."""

    allocation: ApiAllocation | None = None


class ApiResourceClaim(_Read, frozen=True):
    """A ResourceClaim: a claim on devices."""

    metadata: ApiMeta = ApiMeta()
    status: ApiClaimStatus | None = None
