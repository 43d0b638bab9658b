"""In offline tests of policies in real cells, sound policies pass, and faults are reported."""

import textwrap

import pytest

from moorage.lab import policy_test
from moorage.lab.errors import CommandError
from moorage.lab.examples import clusters, metrics, requests
from moorage.lab.policy_test import (
    HASH_SEEDS,
    PolicyTestJob,
    Tried,
    _is_unexplained,
    try_policy,
)
from moorage_policies import catalog

pytestmark = pytest.mark.heavy

ONE = {"inputs": {}, "resources": {"gpus": 1}, "lease": {"ttl_seconds": 60}}


@pytest.fixture(autouse=True)
def two_seeds(monkeypatch):
    """Run policies under two hash seeds only, since each takes a second to start."""
    monkeypatch.setattr(policy_test, "HASH_SEEDS", HASH_SEEDS[:2])


@pytest.fixture
def all_seeds(monkeypatch, two_seeds):
    monkeypatch.setattr(policy_test, "HASH_SEEDS", HASH_SEEDS)
    monkeypatch.setattr(policy_test, "QUICK_SECONDS", 60.0)  # Quick also on a busy machine.


def policy(body, head="", **more):
    source = (
        f"{head}\n"
        "class AIOSv1PolicyRule:\n"
        "    def __init__(self, rule_id, settings, parameters):\n"
        "        self.settings = settings\n"
        "    def eval(self, parameters, input_data, context):\n"
        "        fleet = input_data['fleet']\n"
        "        rows = fleet.feasible().nonzero()[0]\n" + textwrap.indent(body, "        ")
    )
    return {"policy_rule_uri": "mine:1-test", "code": source, **more}


async def test_a_shipped_policy_passes_the_built_in_requests():
    report = await try_policy(PolicyTestJob(catalog.document("best_fit")))
    assert report.passed, report.findings
    assert report.findings == []
    assert len(report.requests) == len(requests())
    assert report.outcomes["granted"] > 20  # The site fills up …
    assert report.outcomes["no_capacity"] > 5  # … and is full in the end.
    assert report.outcomes["never_fits"] == 1
    assert 0 < report.p50_seconds <= report.max_seconds


async def test_a_server_accepts_the_example_site():
    measured = {each["clusterId"] for each in metrics()}
    assert measured < {each["id"] for each in clusters()}, "one cluster has no metrics"


@pytest.mark.parametrize(
    ("document", "finding"),
    [
        (policy("return (((1"), "function.py, line 8: SyntaxError: '(' was never closed\n"),
        (
            {"policy_rule_uri": "a:1-b", "code": "x = 1\ny = 2\n"},
            "there is no class AIOSv1PolicyRule",
        ),
        (policy("return fleet.placement(0, [0])"), "request 0: policy_unsound: "),
        (policy("return 1 / 0"), "request 0: policy_error: the policy raised ZeroDivisionError"),
        (policy("return {'x': {1, 2}}"), "request 0: policy_bad_output: "),
        (policy("return 'x' * (1 << 40)"), "request 0: policy_memory: "),
        (
            policy("return fleet.placement(int(random.choice(list(rows))))", "import random"),
            "the same request, fleet and seed gave ",
        ),
        (
            policy(
                "names = {fleet.node_ids[int(row)]: int(row) for row in rows}\n"
                "return fleet.placement(names[next(iter(set(names)))])"
            ),
            "the same request, fleet and seed gave ",  # Always, since the seeds are fixed.
        ),
        (policy("return {}", policy_input_schema={"x": {"type": "number", "required": True}}), "x"),
    ],
)
async def test_the_test_of_a_policy_finds_each_kind_of_fault(document, finding):
    big = {**ONE, "resources": {"gpus": 8, "gpu_milli": 1000}}
    report = await try_policy(PolicyTestJob(document, [big, *[ONE] * 9]))
    assert not report.passed
    assert finding in report.findings[0]
    numbered = [each for each in report.findings if each.startswith("request ")]
    assert len(numbered) <= 2  # A fault of many requests is reported once.
    if "SyntaxError" in finding:
        assert report.findings[0].endswith("^")  # The line, with a caret under the place.


NONE = "'NoneType' object is not subscriptable"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("[each['cluster_metrics']['cluster'] for each in known]", NONE),
        ("list(map(metrics.get_cluster, ['alpha', 'gamma']))", "no metrics of a cluster"),
        ("known[0]['cluster_metrics']['cluster'], metrics.get_cluster('beta')", NONE),
    ],
)
async def test_the_test_of_a_policy_finds_a_dependence_on_metrics(body, says):
    known = "known = list(input_data['cluster_data'].values())"
    metrics = "metrics = self.settings['cluster_metrics_client']"
    place = "return fleet.placement(int(rows[0])) if len(rows) else {'declined': 'full'}"
    document = policy(f"{known}\n{metrics}\n{body}\n{place}")
    report = await try_policy(PolicyTestJob(document, [ONE] * 3))
    assert not report.passed
    assert says in report.findings[0]
    if "beta" in body:
        (finding,) = report.findings
        assert finding.startswith(
            "request 0, where no cluster has metrics: policy_error: the policy"
        )
        assert finding.endswith("There `cluster_metrics` is None, and `get_cluster` raises")


async def test_later_seeds_find_a_dependence_on_set_order_that_two_seeds_hide(all_seeds):
    """Under the hash seeds 1, 2 and 3 this set has the same first element, under 4 another."""
    choice = "return {'cluster_id': 'alpha', 'x': next(iter({'e', 'g'}))}"
    report = await try_policy(PolicyTestJob(policy(choice), [{"inputs": {}}]))
    assert not report.passed
    assert report.hash_seeds == [1, 2, 3, 4]
    assert "hash seeds 1 and 4)" in report.findings[0]


async def test_a_sound_policy_runs_under_all_seeds(all_seeds):
    report = await try_policy(PolicyTestJob(policy("return fleet.placement(int(rows[0]))"), [ONE]))
    assert (report.passed, report.hash_seeds) == (True, list(HASH_SEEDS))


async def test_a_slow_policy_runs_under_two_seeds(all_seeds, monkeypatch):
    monkeypatch.setattr(policy_test, "QUICK_SECONDS", 0.1)
    slow = "import time\ntime.sleep(0.04)\nreturn fleet.placement(int(rows[0]))"
    report = await try_policy(PolicyTestJob(policy(slow), [ONE] * 3))
    assert (report.passed, report.hash_seeds) == (True, [1, 2])


async def test_a_policy_that_loads_only_under_some_seeds_does_not_pass(all_seeds):
    head = "if next(iter({'e', 'g'})) == 'e':\n    raise ValueError('bad luck')\n"
    report = await try_policy(PolicyTestJob(policy("return {}", head), [ONE]))
    assert not report.passed
    assert report.findings[0].startswith("under hash seed 4, and not under all: ")
    assert "bad luck" in report.findings[0]


async def test_a_policy_that_never_returns_is_stopped_and_its_time_is_shown_line_by_line():
    hung = policy("while True:\n    rows = rows + 1", deadline_seconds=1)
    report = await try_policy(PolicyTestJob(hung, [ONE] * 20))
    assert report.outcomes == {"policy_timeout": 3}  # After three, the test stops.
    assert not report.passed
    assert {"8)", "9)"} & lines_of(report), report.requests  # Perhaps only in some of them.
    first, second = report.profile["lines"][:2]
    assert {first["line"], second["line"]} == {8, 9}
    assert first["file"] == "function.py"
    assert report.profile["seconds"] > 1


def lines_of(report):
    return {tried.detail.rpartition("function.py, line ")[2] for tried in report.requests}


async def test_a_policy_that_sleeps_is_reported_with_its_line():
    hung = policy("rows = 0\nimport time; time.sleep(1000)", deadline_seconds=1)
    report = await try_policy(PolicyTestJob(hung))
    assert report.outcomes == {"policy_timeout": 3}
    assert "9)" in lines_of(report), report.requests


async def test_a_policy_that_declines_most_feasible_requests_fails():
    report = await try_policy(PolicyTestJob(policy("return {'declined': 'it is Monday'}")))
    assert not report.passed
    (finding,) = report.findings
    assert "the policy declined 74 of 77 requests, all of which fit: " in finding
    assert "it is Monday" in finding
    assert "give --requests" in finding


async def test_a_policy_may_decline_requests_of_its_author():
    declining = policy("return {'declined': 'x'}")
    job = PolicyTestJob(declining, [ONE] * 3)
    assert (await try_policy(job)).passed


async def test_a_profile_of_a_policy_is_made_on_demand_and_counts_calls_by_line():
    body = "total = sum(weigh(n) for n in range(3))\nreturn {'total': total}"
    head = "import math\ndef weigh(n):\n    return math.sqrt(n)\n"
    report = await try_policy(PolicyTestJob(policy(body, head), [ONE, ONE], profile=True))
    lines = {line["line"]: line for line in report.profile["lines"]}
    assert lines[3]["text"] == "    return math.sqrt(n)"
    assert lines[3]["hits"] == report.profile["evaluations"] * 3
    assert 'request 0: it fits, and {"total":2' in report.findings[0]


async def test_policies_on_plain_input_are_tested_with_their_output():
    document = policy("", "").copy()
    document["code"] = (
        "class AIOSv1PolicyRule:\n"
        "    def __init__(self, rule_id, settings, parameters): pass\n"
        "    def eval(self, parameters, input_data, context):\n"
        "        print('ranked')\n"
        "        return sorted(input_data) if isinstance(input_data, list) else {}\n"
    )
    report = await try_policy(PolicyTestJob(document, [{"input_data": ["b", "a"]}]))
    assert report.passed, report.findings
    assert report.requests[0].values == (["a", "b"],)
    assert "ranked" in report.printed


async def test_an_answer_with_neither_placement_nor_reason_is_reported():
    advice = {"inputs": {}, "resources": {"gpus": 1}}
    report = await try_policy(PolicyTestJob(policy("return {}"), [advice, ONE, {"inputs": {}}]))
    (finding,) = report.findings
    assert finding.startswith("request 0: it fits, and {} says neither where it goes nor why")
    assert "(1 more request likewise)" in finding  # The last request has no resources.
    assert finding.endswith('and a no {"declined": "…"} with the reason')


@pytest.mark.parametrize(
    ("value", "explained"),
    [
        *[(each, False) for each in (None, {}, [], "no", {"cluster_id": None}, {"declined": " "})],
        *[(each, True) for each in ({"declined": "full"}, {"error": "no rack"})],
    ],
)
def test_the_report_explains_a_refusal(value, explained):
    assert _is_unexplained(Tried(ONE, "policy_declined", "", (value,), 0.0)) is not explained


async def test_unknown_fields_of_requests_yield_a_warning_as_on_a_server():
    own = policy("return {'declined': 'x'}")
    requested = [{**ONE, "gpus": 1}, {**ONE, "gpus": 2}, {"input_data": [], "inputs": {}}]
    report = await try_policy(PolicyTestJob(own, requested))
    ignored, beside = report.notes[-2:]
    assert ignored == (
        "request 0: gpus: unknown field, it was ignored (did you mean resources.gpus?)."
        " (1 more request likewise)"
    )
    assert beside == "request 2: inputs: it was ignored, since input_data was given."
    for refused in ({"dryrun": True}, {"strict": True, "gpus": 1}):
        with pytest.raises(CommandError, match=r"request 0: \w+: unknown field; expected"):
            await try_policy(PolicyTestJob(own, [{**ONE, **refused}]))


async def test_an_invalid_request_of_the_test_is_an_error_and_no_fault_of_the_policy():
    with pytest.raises(CommandError, match=r"request 0: .*resources"):
        await try_policy(PolicyTestJob(policy("return {}"), [{"resources": 3}]))
    with pytest.raises(CommandError, match="cluster document"):
        await try_policy(PolicyTestJob(policy("return {}"), [ONE], [{"nodes": 1}]))
