"""Backtests decide as in production, print equal bytes every time, and replay ledgers."""

import json
import re

import msgspec
import pytest

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Granted
from moorage.core.state.state import State, apply
from moorage.core.turns.effects import Address, Consult
from moorage.core.turns.events import Asked, Proposed, Tick
from moorage.lab import timeline
from moorage.lab.backtest import BacktestJob, backtest, fragmentation_milli
from moorage.lab.errors import CommandError
from moorage.lab.trace import TraceError
from moorage.model import Ask, Demand, LeaseTerms, PolicyRef, RequestId, SessionId, Tenant
from moorage.policy import Fleet
from tests.ledger.facts import opened

pytestmark = pytest.mark.heavy

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(
    f"n{n},64000,262144,{4 if n % 2 else 2},{'A100' if n % 2 else 'T4'}\n" for n in range(6)
)
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"
    + "".join(
        f"p{n:02d},{1000 + n},1024,{n % 3},{(0, 500, 1000)[n % 3]},{'A100' if n % 7 == 2 else ''},"
        f"{10 * n},{10 * n + 300}\n"
        for n in range(40)
    )
)


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(PODS)
    return {"nodes": str(tmp_path / "nodes.csv"), "pods": str(tmp_path / "pods.csv")}


def shipped_policies(*names):
    return [{"shipped": name} for name in names]


async def test_a_backtest_of_equal_input_gives_equal_bytes(trace, tmp_path):
    outcomes = []
    for turn in ("a", "b"):
        files = [tmp_path / f"{turn}.svg", tmp_path / f"{turn}.png"]
        job = BacktestJob(
            shipped_policies("random", "best_fit"), **trace, plots=[str(file) for file in files]
        )
        outcome = msgspec.json.encode(await backtest(job))
        outcomes.append((outcome, *(file.read_bytes() for file in files)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1].startswith(b"<?xml")
    assert b"requests from pods.csv" in outcomes[0][1], "the chart has a title"
    ends = re.findall(rb"(random|best_fit):1.0-stable  [\d.]+ %", outcomes[0][1])
    assert sorted(ends) == [b"best_fit"] * 2 + [b"random"] * 2, "each line has a name at its end"
    assert {b"#0072b2", b"#d55e00"} <= set(re.findall(rb"stroke: (#\w+)", outcomes[0][1]))
    assert outcomes[0][2].startswith(b"\x89PNG")
    outcome = json.loads(outcomes[0][0])
    first, second = outcome["rules"]
    assert [first["rule"], second["rule"]] == ["random:1.0-stable", "best_fit:1.0-stable"]
    assert first["asked"] == second["asked"] > 30
    assert first["granted"] + sum(first["refusals"].values()) == first["asked"]
    (differing,) = outcome["differing"]
    assert 0 < differing["placed_elsewhere"] <= differing["asks"]
    other = await backtest(BacktestJob(shipped_policies("random"), **trace, seed=7))
    assert other["rules"][0]["samples"] != first["samples"]


async def test_a_policy_compared_with_itself_shows_no_difference(trace):
    outcome = await backtest(BacktestJob(shipped_policies("best_fit", "best_fit"), **trace))
    assert [run["rule"] for run in outcome["rules"]] == [
        "best_fit:1.0-stable",
        "best_fit:1.0-stable #2",
    ]
    assert outcome["differing"][0]["asks"] == 0


async def test_in_a_backtest_schemas_complete_or_refuse_a_request_as_on_a_server(trace):
    source = (
        "from moorage.policy import best_rows, propose, read_demand\n"
        "class AIOSv1PolicyRule:\n"
        "    def __init__(self, rule_id, settings, parameters): pass\n"
        "    def eval(self, parameters, input_data, context):\n"
        "        fleet, demand = input_data['fleet'], read_demand(input_data)\n"
        "        scores = fleet.feasible(demand) * input_data['inputs']['weight']\n"
        "        return propose(fleet, demand, best_rows(fleet, demand, scores))\n"
    )
    weight = {"type": "number", "default": 2}
    rules = [
        {"policy_rule_uri": uri, "code": source, "policy_input_schema": {"weight": schema}}
        for uri, schema in (("has:1-x", weight), ("wants:1-x", {**weight, "required": True}))
    ]
    del rules[1]["policy_input_schema"]["weight"]["default"]
    has, wants = (await backtest(BacktestJob(rules, **trace, limit=5)))["rules"]
    assert has["granted"] == 5
    assert wants["refusals"] == {"bad_message": 5}


async def test_in_a_timed_backtest_requests_wait_and_end(trace):
    job = BacktestJob(shipped_policies("first_fit"), **trace, timed=True)
    (at_once,) = (await backtest(job))["rules"]
    assert at_once["asked"] == 40
    assert at_once["refusals"]["no_capacity"] > 0
    assert at_once["waited"] == 0
    patient = BacktestJob(shipped_policies("first_fit"), **trace, timed=True, wait_seconds=10_000)
    (waited,) = (await backtest(patient))["rules"]
    assert waited["granted"] == 40
    assert waited["waited"] >= at_once["refusals"]["no_capacity"]
    assert 0 < waited["waited_seconds_mean"] < 300


async def test_only_requests_after_the_warm_up_count_for_the_result(trace):
    job = BacktestJob(shipped_policies("first_fit", "expected_fill"), **trace, churn=1.2)
    outcome = await backtest(job)
    assert msgspec.json.encode(outcome) == msgspec.json.encode(await backtest(job))
    assert outcome["source"]["churn"] == {"load": 1.2, "stays": "memoryless"}
    first, second = outcome["rules"]
    assert first["asked"] == second["asked"] > 20
    for run in (first, second):
        assert 50 < run["allocation_percent_mean"] <= 100
        assert 0 < run["refused_percent"] < 100
        assert list(run["sizes"]) == ["CPU only", "share", "2 GPUs"]
        assert sum(size["asked"] for size in run["sizes"].values()) == run["asked"]
        assert sum(size["granted"] for size in run["sizes"].values()) == run["granted"]
        assert run["samples"][0][0] >= 2 * 3600
    patient = BacktestJob(
        shipped_policies("first_fit"), **trace, churn=0.9, stays="sized", wait_seconds=1e7
    )
    (waited,) = (await backtest(patient))["rules"]
    assert (waited["refused_percent"], waited["refusals"]) == (0, {})
    longest = max(waited["sizes"].values(), key=lambda size: size["waited_seconds_mean"])
    assert longest is waited["sizes"]["2 GPUs"]
    assert longest["waited_seconds_mean"] > 0


def play_day(line):
    """Return facts of a day with their times; each request goes to the first node that fits."""
    allocator, facts, now = Allocator(), [], 0.0

    def step(event):
        turns = [allocator.step(event, now)]
        for turn in turns:
            facts.extend((now, fact) for fact in turn.facts)
            for effect in turn.effects:
                if isinstance(effect, Consult):
                    answer = Proposed(effect.ask.id, effect.consultation, {"cluster_id": "openb"})
                    turns.append(allocator.step(answer, now))

    step(line.inventory[0][1])
    for number, (at, ask) in enumerate(line.asks):
        while (due := allocator.next_deadline()) is not None and due <= at:
            now = due
            step(Tick())
        now = at
        step(Asked(Address(SessionId("s"), number), ask))
    return facts


async def test_a_ledger_is_replayed_as_far_as_its_facts_reach(trace, tmp_path):
    line = timeline.of_trace(
        tmp_path / "nodes.csv", tmp_path / "pods.csv",
        arrive=1.3, seed=1, limit=None, timed=True, wait_seconds=100.0,
    )  # fmt: skip
    facts = play_day(line)
    granted = sum(isinstance(fact, Granted) for _, fact in facts)
    data = tmp_path / "data"
    data.mkdir()
    ledger = await opened(data / "ledger.db")
    for now, fact in facts:
        await ledger.append([fact], now)
    # The ledger is replayed while its daemon still uses it.
    outcome = await backtest(BacktestJob(shipped_policies("first_fit", "spread"), ledger=str(data)))
    await ledger.close()
    first, second = outcome["rules"]
    # A history by first fit, replayed with first fit, gives the same decisions.
    assert first["granted"] == granted > 20
    assert first["waited"] > 0
    assert first["asked"] == second["asked"]
    assert outcome["notes"] == [timeline.LIMITS_OF_A_LEDGER]
    assert outcome["differing"][0]["placed_elsewhere"] > 0


async def test_a_pruned_ledger_is_replayed_from_its_first_fact(trace, tmp_path):
    line = timeline.of_trace(
        tmp_path / "nodes.csv", tmp_path / "pods.csv",
        arrive=1.3, seed=1, limit=None, timed=True, wait_seconds=100.0,
    )  # fmt: skip
    data, state = tmp_path / "data", State()
    data.mkdir()
    ledger = await opened(data / "ledger.db")
    facts = play_day(line)
    for number, (now, fact) in enumerate(facts, 1):
        apply(state, fact)
        await ledger.append([fact], now)
        if number in (len(facts) // 2, len(facts) - 1):
            await ledger.checkpoint(number, list(condense(state)))
    while await ledger.prune(facts[-1][0] + 1, 1 << 40):
        pass
    outcome = await backtest(BacktestJob(shipped_policies("first_fit"), ledger=str(data)))
    await ledger.close()
    assert outcome["rules"][0]["granted"] > 0
    assert outcome["notes"] == [timeline.LIMITS_OF_A_LEDGER, timeline.PRUNED]


async def test_errors_name_the_input_that_cannot_be_replayed(trace, tmp_path):
    with pytest.raises(CommandError, match="no shipped policy 'nope'; there are first_fit"):
        await backtest(BacktestJob(shipped_policies("nope"), **trace))
    with pytest.raises(CommandError, match="there is no ledger"):
        await backtest(BacktestJob(shipped_policies("first_fit"), ledger=str(tmp_path)))
    with pytest.raises(CommandError, match="churn draws its own times"):
        await backtest(BacktestJob(shipped_policies("fgd"), **trace, churn=1.0, timed=True))
    with pytest.raises(CommandError, match=r"plots are \.png or \.svg files"):
        await backtest(BacktestJob(shipped_policies("first_fit"), **trace, plots=["a.pdf"]))
    broken = {"policy_rule_uri": "a:1-b", "code": "class AIOSv1PolicyRule:\n  def"}
    with pytest.raises(CommandError, match="SyntaxError"):
        await backtest(BacktestJob([broken], **trace))
    (tmp_path / "pods.csv").write_text("name\np\n")
    with pytest.raises(TraceError, match="cpu_milli"):
        await backtest(BacktestJob(shipped_policies("first_fit"), **trace))


def test_fragmentation_is_the_capacity_that_typical_requests_cannot_use(trace, tmp_path):
    fleet = Fleet()
    line = timeline.of_trace(
        tmp_path / "nodes.csv", tmp_path / "pods.csv",
        arrive=1.0, seed=1, limit=None, timed=False, wait_seconds=0.0,
    )  # fmt: skip
    fleet.install([line.inventory[0][1].cluster])
    one = {"cpu_milli": 1, "gpus": 1, "gpu_milli": 500, "models": [], "weight": 1}
    assert fragmentation_milli(fleet, [one]) == 0
    fleet.gpu_free[fleet.gpu_free > 0] = 400
    assert fragmentation_milli(fleet, [one]) == fleet.gpu_free.sum()
    half = {**one, "gpu_milli": 300}
    assert fragmentation_milli(fleet, [one, half]) == fleet.gpu_free.sum() / 2
    assert fragmentation_milli(fleet, []) == 0


def test_a_replayed_request_has_no_idempotency_key_and_no_policy():
    ask = Ask(
        RequestId("r"), Tenant("t"), PolicyRef("a:1-b", "d"), demand=Demand(gpus=1),
        terms=LeaseTerms(60.0, 5.0, idempotency_key="k"), parameters={"x": 1},
    )  # fmt: skip
    again = timeline._again(ask, 12.5, 7.0)
    assert again.terms == LeaseTerms(12.5, 7.0)
    assert (again.policy, again.parameters) == (PolicyRef("", ""), {})
