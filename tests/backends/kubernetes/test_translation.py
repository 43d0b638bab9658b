"""Tests of the fields that a manifest may have, without a cluster."""

from typing import Any

import pytest
from msgspec.structs import replace

from moorage.backends.base import Order, UnsupportedSpecError
from moorage.backends.kubernetes.specs import JobResourceSpec, PodResourceSpec
from moorage.backends.kubernetes.workloads.manifests import start_objects
from moorage.backends.kubernetes.workloads.translation import pod_order
from moorage.backends.specs import ContainerResourceSpec
from moorage.model import ClusterId, NodeId, Share


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        ({"spec": {"affinity": []}}, "manifest.spec.affinity: expected"),
        ({"spec": {"affinity": {"nodeAffinity": 1}}}, "manifest.spec.affinity"),
        ({"spec": {"tolerations": ["x"]}}, "manifest.spec.tolerations"),
        ({"spec": {"containers": [{"name": "main", "resources": "x"}]}}, "resources: expected"),
        ({"spec": {"containers": [{"name": "main", "resources": {"limits": 5}}]}}, "limits"),
        ({"spec": {"containers": [{"name": ""}]}}, "manifest.spec.containers"),
        ({"spec": {"nodeName": "n2"}}, "manifest.spec.nodeName: expected nothing"),
        ({"spec": {"resourceClaims": [{"name": "x"}]}}, "manifest.spec.resourceClaims: .*devices"),
        (
            {"spec": {"containers": [{"name": "s", "resources": {"claims": [{"name": "x"}]}}]}},
            "manifest.spec.containers: .*devices",
        ),
        (
            {
                "spec": {
                    "initContainers": [{"name": "s", "env": [{"name": "NVIDIA_VISIBLE_DEVICES"}]}]
                }
            },
            "NVIDIA_VISIBLE_DEVICES: .*devices",
        ),
        ({"metadata": {"labels": [1]}}, "manifest.metadata.labels"),
        ({"spec": 3}, "manifest.spec"),
    ],
)
def test_forbidden_fields_of_a_pod_are_refused_by_name(manifest: dict, field: str) -> None:
    with pytest.raises(UnsupportedSpecError, match=field):
        pod_order(PodResourceSpec(image="a", manifest=manifest))


@pytest.mark.parametrize("vendor", ["NVIDIA", "AMD", "ASCEND", "HABANA"])
def test_a_specs_environment_cannot_claim_all_devices(vendor: str) -> None:
    spec = PodResourceSpec(image="a", environment={f"{vendor}_VISIBLE_DEVICES": "all"})
    with pytest.raises(UnsupportedSpecError, match=f"environment: {vendor}_VISIBLE_DEVICES"):
        pod_order(spec)


@pytest.mark.parametrize(
    "manifest",
    [
        {"metadata": None, "spec": None},
        {"metadata": {"labels": None, "annotations": None}},
        {"spec": {"affinity": None, "tolerations": None, "containers": None}},
        {"spec": {"affinity": {"nodeAffinity": None}}},
        {"spec": {"containers": [{"name": "main", "resources": None, "image": None}]}},
    ],
)
def test_a_null_field_counts_as_missing(manifest: dict) -> None:
    place = Share(ClusterId("c1"), NodeId("n1"), ("0",), 1000)
    made = [
        start_objects(
            Order("a", spec, (place,), {}, 30), pod_order(spec), "server", "default", {"n1": {}}, ""
        ).pods[0]["spec"]
        for spec in (PodResourceSpec(image="a", manifest=manifest), PodResourceSpec(image="a"))
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("spec", [PodResourceSpec, JobResourceSpec])
def test_the_grace_period_of_a_manifest_cannot_exceed_the_limit(
    spec: type[PodResourceSpec],
) -> None:
    probe = {"exec": {"command": ["true"]}, "terminationGracePeriodSeconds": 3600}
    pod = {
        "terminationGracePeriodSeconds": 3600,
        "containers": [{"name": "main", "livenessProbe": probe}],
    }
    for given in (
        spec(image="a", stop_seconds=3600),
        spec(image="a", manifest={"spec": pod}),
    ):
        order = Order("a", given, stop_seconds_max=59.5)
        made = start_objects(order, pod_order(given), "server", "default", {}, "").pods[0]["spec"]
        made = made.get("template", {"spec": made})["spec"]
        assert made["terminationGracePeriodSeconds"] == 60
        probe = made["containers"][0].get("livenessProbe", {})
        assert probe.get("terminationGracePeriodSeconds", 0) <= 60


HELD = Share(ClusterId("c1"), NodeId("n1"), ("0",), 1000, 4000, 1024)
ONLY_CPU = Share(ClusterId("c1"), NodeId("n1"), (), 1000, 4000, 1024)
VOID = [
    {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
    *({"name": f"{vendor}_VISIBLE_DEVICES", "value": ""} for vendor in ("AMD", "ASCEND", "HABANA")),
]


def pod_of(spec: Any, share: Share = HELD, published: dict[str, Any] | None = None) -> Any:
    """Return the spec of the pod for a lease."""
    order = Order("a", spec, (share,), {}, 30)
    made = start_objects(order, pod_order(spec), "server", "default", {"n1": published or {}}, "")
    return made.pods[0]["spec"]


def container(spec: Any, name: str = "main", kind: str = "containers") -> Any:
    return next(each for each in spec[kind] if each["name"] == name)


def limited_container(
    name: str, cpu: Any = "1", memory: Any = "256Mi", **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "image": "b",
        "resources": {"limits": {"cpu": cpu, "memory": memory}},
    } | more


def beside(*containers: dict[str, Any], **more: Any) -> PodResourceSpec:
    manifest = {"spec": {"containers": list(containers), **more}}
    return PodResourceSpec(image="a", manifest=manifest)


def test_a_container_without_devices_sees_no_device_whatever_its_image_says() -> None:
    source = [{"configMapRef": {"name": "c"}}]
    sidecar = limited_container("proxy", restartPolicy="Always", envFrom=source)
    init = limited_container("fetch", env=[{"name": "A", "value": "b"}])
    spec = beside(limited_container("log", envFrom=source), initContainers=[sidecar, init])
    made = pod_of(spec)
    assert "env" not in container(made) or VOID[0] not in container(made)["env"]
    for name, kind in (("log", "containers"), ("proxy", "initContainers")):
        assert container(made, name, kind)["env"][-4:] == VOID
    assert container(made, "fetch", "initContainers")["env"] == [{"name": "A", "value": "b"}, *VOID]
    made = pod_of(spec, ONLY_CPU)
    assert container(made)["env"][-4:] == VOID, "a lease of CPU has no GPU"


def test_the_environment_of_a_container_with_devices_names_no_other_devices() -> None:
    for prefix, fits in (("", False), ("NVIDIA_", False), ("AMD_VISIBLE", False), ("APP_", True)):
        source = {"prefix": prefix, "configMapRef": {"name": "c"}}
        spec = beside({"name": "main", "envFrom": [source]})
        if fits:
            pod_of(spec)
        else:
            with pytest.raises(UnsupportedSpecError, match="envFrom: expected a `prefix`"):
                pod_of(spec)
        pod_of(spec, ONLY_CPU)


@pytest.mark.parametrize("kind", ["containers", "initContainers", "ephemeralContainers"])
@pytest.mark.parametrize("where", ["limits", "requests"])
@pytest.mark.parametrize(
    "name",
    ["google.com/tpu", "gpu.intel.com/i915", "nvidia.com/mig-1g.5gb", "example.com/dongle", "x"],
)
def test_a_device_that_the_lease_does_not_hold_is_refused(kind: str, where: str, name: str) -> None:
    manifest = {"spec": {kind: [{"name": "main", "resources": {where: {name: 1}}}]}}
    with pytest.raises(UnsupportedSpecError, match=f"{name}: expected no devices"):
        pod_order(PodResourceSpec(image="a", manifest=manifest))


@pytest.mark.parametrize(
    "manifest",
    [
        {"spec": {"resources": {"limits": {"google.com/tpu": 4}}}},
        {"spec": {"resources": {"claims": [{"name": "x"}]}}},
        {"metadata": {"annotations": {"cdi.k8s.io/all": "nvidia.com/gpu=all"}}},
        {"metadata": {"annotations": {"nvidia.cdi.k8s.io/all": "nvidia.com/gpu=all"}}},
        {"metadata": {"annotations": {"devices.nri.io/container.main": "- path: /dev/nvidia0"}}},
        {"metadata": {"annotations": {"io.kubernetes.cri-o.Devices": "/dev/nvidia0"}}},
        {
            "spec": {
                "containers": [
                    {
                        "name": "main",
                        "volumeMounts": [
                            {"name": "n", "mountPath": "/var/run//nvidia-container-devices/all"}
                        ],
                    }
                ]
            }
        },
    ],
)
def test_a_manifest_that_gives_access_to_devices_is_refused(manifest: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSpecError, match="expected no devices"):
        pod_order(PodResourceSpec(image="a", manifest=manifest))


@pytest.mark.parametrize(
    ("resource", "fits"),
    [("nvidia.com/gpu", True), ("amd.com/gpu", True), ("google.com/tpu", False), ("cpu", False)],
)
def test_the_field_gpu_resource_must_name_a_resource_of_gpus(resource: str, *, fits: bool) -> None:
    spec = PodResourceSpec(image="a", gpu_resource=resource)
    if fits:
        assert container(pod_of(spec))["resources"]["limits"][resource] == "1"
    else:
        with pytest.raises(UnsupportedSpecError, match="gpu_resource: expected"):
            pod_of(spec)


BEYOND = [
    PodResourceSpec(image="a", cpu_count=4.001),
    PodResourceSpec(image="a", mem_limit="2g"),
    ContainerResourceSpec(image="a", cpu_count=64),
    ContainerResourceSpec(image="a", mem_limit=1 << 40),
    beside({"name": "main", "resources": {"requests": {"cpu": "4001m"}}}),
    beside({"name": "main", "resources": {"limits": {"memory": "1Ti"}}}),
    beside(limited_container("log", "3"), limited_container("main", "2")),
    beside(limited_container("log", memory="1Gi")),
    beside(limited_container("log"), initContainers=[limited_container("in", "5")]),
    beside(
        initContainers=[
            limited_container("proxy", "3", restartPolicy="Always"),
            limited_container("in", "2"),
        ]
    ),
    beside(
        limited_container("log", "2"),
        initContainers=[limited_container("p", "3", restartPolicy="Always")],
    ),
    beside({"name": "log", "image": "b"}),
    beside({"name": "main", "resources": {"limits": {"memory": "512Mi", "hugepages-2Mi": "1Gi"}}}),
    beside(resources={"limits": {"cpu": "5"}}),
    beside(resources={"requests": {"memory": "2Gi"}}),
    beside({"name": "main", "resources": {"limits": {"cpu": "lots"}}}),
]


@pytest.mark.parametrize("spec", BEYOND)
def test_a_pod_that_requests_more_than_its_lease_is_refused(spec: Any) -> None:
    with pytest.raises(UnsupportedSpecError, match="expected"):
        pod_of(spec)


def test_a_lease_without_cpu_makes_pods_that_request_no_cpu() -> None:
    share = Share(ClusterId("c1"), NodeId("n1"), ("0",), 1000)
    with pytest.raises(UnsupportedSpecError, match="cpu_milli in `resources`"):
        pod_of(PodResourceSpec(image="a", cpu_count=1), share)
    assert "cpu" not in container(pod_of(PodResourceSpec(image="a"), share))["resources"]["limits"]


def test_the_main_container_gets_the_resources_that_others_leave() -> None:
    spec = beside(limited_container("log", 0.5), initContainers=[{"name": "in", "image": "b"}])
    made = pod_of(spec)
    assert container(made)["resources"]["limits"] == {
        "cpu": "3500m",
        "memory": str(768 << 20),
        "nvidia.com/gpu": "1",
    }
    whole = {"cpu": "4000m", "memory": str(1 << 30)}
    assert container(made, "in", "initContainers")["resources"] == {
        "limits": whole,
        "requests": whole,
    }
    exact = PodResourceSpec(image="a", cpu_count=4, mem_limit="1g")
    assert container(pod_of(exact))["resources"]["limits"]["cpu"] == "4000m"
    manifest = beside({"name": "main", "resources": {"requests": {"cpu": "1"}}})
    assert container(pod_of(manifest))["resources"]["limits"]["cpu"] == "1"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            {"manifest": {"metadata": {kind: {f"moorage.dev/{name}": "x"}}}},
            rf"manifest.metadata.{kind}.moorage.dev/{name}: expected no name of moorage.dev",
        )
        for kind in ("labels", "annotations")
        for name in ("gpus", "endpoint", "probed", "server", "anything")
    ]
    + [
        ({"labels": {"moorage.dev/start": "x"}}, "labels.moorage.dev/start: expected no name"),
        (
            {"manifest": {"spec": {"template": {"metadata": {"labels": {"moorage.dev/a": "x"}}}}}},
            "manifest.spec.template.metadata.labels.moorage.dev/a",
        ),
        ({"manifest": {"metadata": {"labels": {"x.moorage.dev/a": "x"}}}}, "x.moorage.dev/a"),
    ],
)
def test_reserved_names_are_refused(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedSpecError, match=field):
        pod_order(PodResourceSpec(image="a", **spec))


def test_pods_of_a_gang_are_equal_and_the_spec_is_unchanged() -> None:
    spec = beside(limited_container("log"), initContainers=[{"name": "in", "image": "b"}])
    before = repr(spec)
    order = Order("a", spec, (HELD, replace(HELD, node_id=NodeId("n2"))), {}, 30)
    one, two = start_objects(order, pod_order(spec), "server", "default", {}, "").pods
    assert container(one["spec"], "log") == container(two["spec"], "log")
    assert container(one["spec"])["resources"] == container(two["spec"])["resources"]
    assert repr(spec) == before
