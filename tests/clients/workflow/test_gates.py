"""Tests of single gates, and of several gates by name."""

import asyncio
import threading

import pytest

from moorage_client.workflow import (
    ApprovalGate,
    DAGExecutor,
    GateController,
    GateRejected,
    GateStatus,
    GateTimeout,
)
from tests.clients.workflow.graphs import graph

WAITS = [lambda gate: gate.wait_sync(), lambda gate: asyncio.run(gate.wait_async())]
both = pytest.mark.parametrize("wait", WAITS)


def resolve_when_waiting(gate, resolve):
    def look() -> None:
        while gate.status is not GateStatus.WAITING:
            pass
        resolve()

    threading.Thread(target=look, daemon=True).start()


@both
def test_a_wait_at_a_gate_ends_with_its_approval_rejection_or_timeout(wait):
    gate = ApprovalGate()
    resolve_when_waiting(gate, gate.approve)
    wait(gate)
    assert gate.status is GateStatus.APPROVED
    wait(gate)
    gate.reset()
    resolve_when_waiting(gate, lambda: gate.reject("not ready"))
    with pytest.raises(GateRejected, match="the gate was rejected: not ready"):
        wait(gate)
    late = ApprovalGate(timeout=0.01)
    with pytest.raises(GateTimeout, match=r"not approved within 0\.01 s"):
        wait(late)
    assert late.status is GateStatus.TIMED_OUT


def test_a_controller_resolves_gates_by_name():
    gates = GateController({"deploy": ApprovalGate(), "tell": ApprovalGate()})
    gates.add_gate("open", ApprovalGate(auto_approve=True))
    gates.wait_sync("open")
    asyncio.run(gates.wait_async("open"))
    assert gates.has_gate("tell")
    assert gates.get_gate("tel") is None
    with pytest.raises(KeyError, match="No gate named 'tel'"):
        gates.approve("tel")
    resolve_when_waiting(gates["tell"], lambda: gates.reject("tell", "no"))
    dag = graph("tell", "deploy", "open")
    resolve_when_waiting(gates["deploy"], lambda: gates.approve("deploy"))
    result = DAGExecutor(dag, gates=gates).execute(dict.fromkeys(dag, list))
    assert isinstance(result["tell"].error, GateRejected)
    assert result.succeeded == 2
    assert gates.status("deploy") is GateStatus.APPROVED
    gates.reset_all()
    assert {gates.status(name) for name in gates} == {GateStatus.PENDING}
    assert gates.waiting_gates() == []
