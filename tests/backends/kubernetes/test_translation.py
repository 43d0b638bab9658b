"""What a manifest may say; no cluster is asked for that."""

import pytest

from moorage.backends.base import Order, UnsupportedSpecError
from moorage.backends.kubernetes.workloads.manifests import start_objects
from moorage.backends.kubernetes.workloads.translation import pod_order
from moorage.backends.remote_specs import JobResourceSpec, PodResourceSpec
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
def test_what_a_pod_cannot_have_is_refused_by_its_field(manifest: dict, field: str) -> None:
    with pytest.raises(UnsupportedSpecError, match=field):
        pod_order(PodResourceSpec(image="a", manifest=manifest))


def test_all_devices_cannot_be_asked_for_in_the_environment() -> None:
    spec = PodResourceSpec(image="a", environment={"NVIDIA_VISIBLE_DEVICES": "all"})
    with pytest.raises(UnsupportedSpecError, match="environment: NVIDIA_VISIBLE_DEVICES"):
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
def test_a_null_is_as_good_as_nothing(manifest: dict) -> None:
    place = Share(ClusterId("c1"), NodeId("n1"), ("0",), 1000)
    made = [
        start_objects(
            Order("a", spec, (place,), {}, 30), pod_order(spec), "server", "default", {"n1": {}}, ""
        ).pods[0]["spec"]
        for spec in (PodResourceSpec(image="a", manifest=manifest), PodResourceSpec(image="a"))
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("spec", [PodResourceSpec, JobResourceSpec])
def test_no_manifest_asks_for_more_than_the_operator_lets_a_stop_take(
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
