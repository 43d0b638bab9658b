"""Tests of reading records from servers of other versions."""

from typing import Any

import msgspec
import pytest

from moorage.model import Demand
from moorage.records.leases import Lease, NodeName
from moorage.records.reading import read_record
from moorage.records.replies import DecisionRow, ExecutionAnswer, QueuedWaiter
from moorage.records.requests import Resources


def test_fields_that_an_older_server_does_not_send_are_empty() -> None:
    lease = read_record(Lease, {"id": "r-1", "state": "active", "workload": {"phase": "ready"}})
    assert (lease.tenant, lease.placement, lease.fencing, lease.choice) == ("", (), 0, None)
    assert lease.workload is not None
    assert (lease.workload.phase, lease.workload.attempts_max) == ("ready", 0)


def test_unknown_fields_of_a_newer_server_are_ignored() -> None:
    row = {"state": "pondered", "code": "of_the_future", "resources": {"gpus": 1, "planets": 2}}
    read = read_record(DecisionRow, row | {"colour": "red"})
    assert (read.state, read.code) == ("pondered", msgspec.UNSET)
    assert read.resources is not None
    assert read.resources.gpus == 1


def test_known_codes_are_unchanged() -> None:
    assert read_record(DecisionRow, {"code": "busy"}).code == "busy"


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (Lease, {}),
        (Lease, {"id": "r-1"}),
        (Lease, {"id": "r-1", "state": "active", "fencing": "seven"}),
        (ExecutionAnswer, {"output": "hello"}),
        (QueuedWaiter, []),
        (list[QueuedWaiter], [{"position": "first"}]),
    ],
)
def test_missing_or_wrong_essential_fields_are_errors(kind: Any, document: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        read_record(kind, document)


def test_the_token_of_a_lease_appears_in_no_log() -> None:
    lease = read_record(Lease, {"id": "r-1", "state": "active", "token": "secret"})
    assert "secret" not in repr(lease)
    assert "token" not in lease.document()


def test_the_document_of_a_lease_has_all_fields_that_scripts_read() -> None:
    workload = {"backend": "local", "phase": "ready"}
    lease = read_record(Lease, {"id": "r-1", "state": "active", "workload": workload})
    document = lease.document()
    assert (document["reason"], document["retry_at"]) == ("", 0.0)
    assert (document["workload"]["detail"], document["workload"]["outcome"]) == ("", None)
    assert not document.keys() & {"choice", "ttl_max_seconds", "notice", "lost_devices"}


def test_programs_can_unpack_a_node_as_a_pair() -> None:
    name = NodeName("c", "n")
    cluster, node = name
    assert (name, name[1], hash(name)) == ((cluster, node), "n", hash(("c", "n")))
    assert name != ("c", "m")


def test_resources_and_demand_have_the_same_fields_in_the_same_order() -> None:
    assert Resources.__struct_fields__ == Demand.__struct_fields__
