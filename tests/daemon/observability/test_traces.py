"""The daemon traces requests from its own events, at most a bounded number."""

from collections.abc import Iterator

import pytest
import structlog

from moorage.core.state.facts import Ended, Granted
from moorage.core.turns.effects import Address, Start
from moorage.core.turns.events import Tick, WorkloadEnded, WorkloadStarted
from moorage.core.turns.turn import Turn
from moorage.daemon.observability.traces import FOLLOWED_MAX, RequestTraces
from moorage.model import Lease, LeaseTerms, PolicyRef, Provision, RequestId, SessionId, Tenant
from moorage.protocol.messages import AllocationRequest

TRACE = "ab" * 16
MESSAGE = AllocationRequest(
    policy_rule_uri="first_fit", inputs={}, traceparent=f"00-{TRACE}-{'cd' * 8}-01"
)
TENANT = Tenant("ann")


def address(number: int) -> Address:
    return Address(SessionId("s"), number)


@pytest.fixture
def lines() -> Iterator[list]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def test_a_refused_request_is_traced_from_its_socket_to_its_error_code(lines) -> None:
    follower = RequestTraces(None)
    follower.begin(address(1), TENANT, MESSAGE)
    follower.admitted(address(1), RequestId("r1"))
    follower.note_answer(
        address(1), b'{"success":false,"error":{"code":"no_capacity","reason":""}}'
    )
    follower.note_answer(address(1), b"{}")  # An answer to a request that is not traced.
    begun, ended, answered = lines
    assert (begun["event"], begun["part"]) == ("request_part_begun", "admission")
    assert "request" not in begun
    assert (begun["session"], begun["number"]) == ("s", 1)
    assert (ended["request"], ended["session"], ended["number"]) == ("r1", "s", 1)
    assert (answered["event"], answered["code"]) == ("request_answered", "no_capacity")
    assert {each["trace"] for each in lines} == {TRACE}


def test_the_lines_of_a_request_tell_its_workloads_address_and_end(lines) -> None:
    follower, lease = RequestTraces(None), RequestId("r1")
    follower.begin(address(1), TENANT, MESSAGE)
    follower.admitted(address(1), lease)
    provision = Provision("local", {"category": "process"})
    policy, terms = PolicyRef("p", "1"), LeaseTerms(60)
    held = Lease(lease, TENANT, "", policy, (), 7, 0.0, 60.0, terms, provision)
    follower.observe_step(Tick(), Turn([Granted(held)]))
    follower.note_effect(Start(held))
    follower.note_answer(address(1), b"{}")
    follower.observe_step(WorkloadStarted(lease, 7, "tcp://n1:80"), Turn())
    assert (lines[-1]["part"], lines[-1]["address"]) == ("start", "tcp://n1:80")
    ended = WorkloadEnded(lease, 7, "failed", "it exited", 3)
    follower.observe_step(ended, Turn([Ended(lease, 2.0, "its workload failed")]))
    workload, end = lines[-2:]
    assert (workload["event"], workload["phase"]) == ("request_workload_ended", "failed")
    assert (workload["reason"], workload["exit_code"]) == ("it exited", 3)
    assert (end["event"], end["reason"]) == ("request_lease_ended", "its workload failed")
    assert {each["request"] for each in lines[1:]} == {lease}


def test_the_loss_of_a_session_ends_the_traces_of_its_requests(lines) -> None:
    follower = RequestTraces(None)
    follower.begin(address(1), TENANT, MESSAGE)
    follower.forget(address(1))
    assert [each.get("lost") for each in lines] == [None, None, True]
    assert [(each["session"], each["number"]) for each in lines] == [("s", 1)] * 3
    follower.admitted(address(1), RequestId("r1"))
    assert len(lines) == 3


def test_beyond_the_bound_of_open_traces_the_oldest_trace_is_dropped(lines) -> None:
    follower = RequestTraces(None)
    for number in range(FOLLOWED_MAX + 1):
        follower.begin(address(number), TENANT, MESSAGE)
    assert [each["crowded_out"] for each in lines if "crowded_out" in each] == [True]
    del lines[:]
    follower.note_answer(address(0), b"{}")
    assert lines == []
    follower.note_answer(address(1), b"{}")
    assert lines[-1]["event"] == "request_answered"
