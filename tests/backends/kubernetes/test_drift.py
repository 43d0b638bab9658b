"""Tests of drift, the differences between leases and the state of a Kubernetes cluster."""

from typing import Any

import pytest

from moorage.backends.kubernetes.drift import drifts
from moorage.model import (
    ClusterId,
    Lease,
    LeaseTerms,
    NodeId,
    PolicyRef,
    RequestId,
    Share,
    Tenant,
)


def lease(cluster: str = "c1", gpus: tuple[str, ...] = ("a", "b")) -> Lease:
    return Lease(
        id=RequestId("l1"),
        tenant=Tenant("ann"),
        token_digest="",
        policy=PolicyRef("p", "d"),
        placement=(Share(ClusterId(cluster), NodeId("n1"), gpus),),
        fencing=1,
        granted_at=0,
        expires_at=1,
        terms=LeaseTerms(1),
    )


def machine(gpus: tuple[str, ...] = ("a", "b"), **more: Any) -> dict[str, Any]:
    return {"id": "n1", "gpus": {"gpus": [{"id": each} for each in gpus]}, **more}


@pytest.mark.parametrize(
    ("machines", "kinds"),
    [
        ({"n1": machine()}, []),
        ({}, ["node_gone"]),
        ({"n1": machine(unavailable="cordoned")}, ["node_unavailable"]),
        ({"n1": machine(("a",))}, ["device_gone"]),
        ({"n1": machine(used={"gpus": ["b"]})}, ["device_taken"]),
        ({"n1": machine(used={"gpus": ["c"]})}, []),
        (
            {"n1": machine(("a",), unavailable="not ready", used={"gpus": ["a"]})},
            ["node_unavailable", "device_gone", "device_taken"],
        ),
    ],
)
def test_each_kind_of_drift_is_found(machines: dict[str, Any], kinds: list[str]) -> None:
    found = drifts([lease(), lease("elsewhere")], "c1", machines)
    assert [each.kind for each in found] == kinds
    assert {(each.lease, each.tenant, each.node) for each in found} <= {("l1", "ann", "n1")}


def test_a_finding_of_drift_names_the_node_and_the_cause() -> None:
    (found,) = drifts([lease()], "c1", {"n1": machine(("a",))})
    assert found.detail == "node n1 no longer has GPU b"
    (found,) = drifts([lease()], "c1", {"n1": machine(unavailable="cordoned")})
    assert found.detail == "node n1 takes no new pods: cordoned"
