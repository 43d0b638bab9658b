"""Tests of policies on plain input (documents to rank) in real cells: input and faults."""

import asyncio

import pytest

from moorage.model import ClusterId, Code, Demand, NodeId, Share, Tenant
from moorage.sandbox.host.sandbox import Limits, PolicyFault
from moorage.sandbox.wire.limits import INPUT_BYTES_MAX

TENANT = Tenant("t")
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


async def evaluate(bench, code, input_data=None, **more):
    given = {"parameters": {}, "settings": {}, **more}
    return await bench.sandbox.evaluate(code, TENANT, input_data, **given)


async def fault_of(bench, code, input_data=None, **more):
    with pytest.raises(PolicyFault) as fault:
        await evaluate(bench, code, input_data, **more)
    return fault.value.refusal


async def test_a_policy_on_plain_documents_gets_input_and_parameters_and_settings_and_clients(
    bench,
):
    code = bench.policy(
        """
read = self.settings["cluster_client"].read_cluster("c0")
return [input_data, parameters, self.settings["a"], self.settings["b"], read[0]]
""",
        settings={"a": 1, "b": 1},
        parameters={"x": 1, "y": 1},
    )
    documents = [{"id": "c0", "gpus": {"count": 2}}, {"id": "c1", "text": "ä"}]
    value = await evaluate(bench, code, documents, parameters={"x": 2}, settings={"b": 2})
    assert value == [documents, {"x": 2, "y": 1}, 1, 2, True]
    assert bench.registry.calls[0][1:] == ("read_cluster", ("c0",))
    # Without overrides the defaults count again, and no document was fetched.
    assert (await evaluate(bench, code, []))[1:4] == [{"x": 1, "y": 1}, 1, 1]
    assert bench.registry.fetched == []


@IN_ONE_LOOP
async def test_a_cell_sends_returned_documents_as_ids_if_the_host_needs_only_ids(shared_bench):
    code = shared_bench.policy("return input_data['give']")
    long = "x" * 100_000
    many = [{"id": f"c{number}", "pad": long} for number in range(50)]
    given = {"give": many}
    ids = await evaluate(shared_bench, code, given, ids_only=True)
    assert ids == [document["id"] for document in many]
    assert (await fault_of(shared_bench, code, given)).code is Code.POLICY_BAD_OUTPUT
    for give, expected in [({"id": "c1", "x": 2}, "c1"), (["c1", {"no": 1}], ["c1", {"no": 1}])]:
        assert await evaluate(shared_bench, code, {"give": give}, ids_only=True) == expected


@IN_ONE_LOOP
async def test_a_policy_has_one_context_per_tenant_for_rankings_and_consultations(shared_bench):
    code = shared_bench.policy("context['n'] = context.get('n', 0) + 1\nreturn context['n']")
    assert await evaluate(shared_bench, code) == 1
    assert await shared_bench.value(code) == 2
    assert await evaluate(shared_bench, code) == 3
    assert (
        await shared_bench.sandbox.evaluate(code, Tenant("u"), None, parameters={}, settings={})
        == 1
    )


async def test_an_evaluation_on_plain_documents_has_no_fleet_and_does_not_change_the_cells_view(
    bench,
):
    rank = bench.policy("return sorted(input_data)", "rank")
    assert await evaluate(bench, rank, {"b": 1, "a": 2}) == ["a", "b"]
    code = bench.policy(
        "if isinstance(input_data, list):\n    return 'ranked'\n"
        "return input_data['fleet'].feasible().tolist()",
        "both",
    )
    demand = Demand(gpus=4)
    assert await bench.value(code, demand=demand) == [True] * 4
    bench.fleet.take(Share(ClusterId("c1"), NodeId("n0"), ("0",), 1000, 0, 0))
    assert await evaluate(bench, code, []) == "ranked"
    assert await bench.value(code, demand=demand) == [True, True, False, True]


@IN_ONE_LOOP
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise ValueError('no')", Code.POLICY_ERROR),
        ("return {1, 2}", Code.POLICY_BAD_OUTPUT),
        ("while True: pass", Code.POLICY_TIMEOUT),
        ("import ctypes; ctypes.CDLL(None)", Code.POLICY_ERROR),
        ("return 'x' * (2 << 20)", Code.POLICY_BAD_OUTPUT),
        ("return bytearray(1 << 30)", Code.POLICY_MEMORY),
    ],
)
async def test_faults_in_a_plain_evaluation_are_refused_as_in_a_consultation(
    hasty_bench, body, code
):
    bench = hasty_bench
    refusal = await fault_of(bench, bench.policy(body))
    assert refusal.code is code
    assert refusal.details["policy_rule_uri"] == "rule:1-test"
    assert await evaluate(bench, bench.policy("return input_data", "good"), [7]) == [7]


async def test_input_that_the_host_cannot_encode_is_refused_and_never_reaches_a_cell(bench):
    code = bench.policy("return 1")
    large = await fault_of(bench, code, ["x" * (1 << 20)] * 16)
    assert large.code is Code.TOO_LARGE
    assert str(INPUT_BYTES_MAX) in large.expected
    assert (await fault_of(bench, code, object())).code is Code.BAD_MESSAGE
    assert (await fault_of(bench, code, [1 << 70])).code is Code.BAD_MESSAGE
    assert bench.sandbox.report().counters.get("evaluations", 0) == 0
    assert len(await evaluate(bench, bench.policy("return input_data[0]"), ["x" * 99])) == 99


async def test_the_largest_input_reaches_the_policy(make_bench):
    bench = await make_bench(limits=Limits(evaluation_seconds=20))
    code = bench.policy("return len(input_data)")
    assert await evaluate(bench, code, ["x" * ((1 << 20) - 64)] * 16) == 16


async def test_input_that_fills_the_cell_fails_only_that_evaluation(make_bench):
    bench = await make_bench(limits=Limits(memory_mib=64, evaluation_seconds=20))
    code = bench.policy("return len(input_data)")
    # A list needs a few bytes in the frame, but dozens as an object.
    refusal = await fault_of(bench, code, [[[]]] * (4 << 20))
    assert refusal.code in {Code.POLICY_MEMORY, Code.POLICY_CRASHED}
    assert await evaluate(bench, code, [1]) == 1


@pytest.mark.parametrize("isolation", ["per_tenant", "per_eval"])
async def test_isolation_holds_for_evaluations_on_plain_documents(make_bench, isolation):
    bench = await make_bench(isolation=isolation)
    code = bench.policy(
        "import function\nfunction.n = getattr(function, 'n', 0) + 1\nreturn function.n"
    )
    values = [await evaluate(bench, code) for _ in range(2)]
    assert values == ([1, 1] if isolation == "per_eval" else [1, 2])


async def test_a_cancelled_evaluation_does_not_disturb_other_evaluations(bench):
    slow = bench.policy("while True: pass")
    given_up = asyncio.ensure_future(evaluate(bench, slow))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert await evaluate(bench, bench.policy("return 1", "other")) == 1


@IN_ONE_LOOP
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "return math.pi",
            "NameError: name 'math' is not defined. Did you forget to import 'math'?",
        ),
        ("return settings", "name 'settings' is not defined. Did you mean: 'self.settings'?"),
        ("return self.setings", "no attribute 'setings'. Did you mean: 'settings'?"),
        ("import json\nreturn json.dumpz", "no attribute 'dumpz'. Did you mean: 'dump'?"),
        ("from json import dumpz", "cannot import name 'dumpz' from 'json'. Did you mean: 'dump'?"),
        ("return paramters", "name 'paramters' is not defined. Did you mean: 'parameters'?"),
        ("return [].apend(1)", "no attribute 'apend'. Did you mean: 'append'?"),
        ("raise NameError", "the policy raised NameError"),
    ],
)
async def test_pythons_suggestion_for_a_misspelt_name_is_passed_on(shared_bench, body, said):
    refusal = await fault_of(shared_bench, shared_bench.policy(body, "misspelt"))
    assert refusal.code is Code.POLICY_ERROR
    assert "/python" not in refusal.reason, "the folder of libraries stays private"
    assert said in refusal.reason


@IN_ONE_LOOP
async def test_a_misspelt_name_of_moorage_gets_a_suggestion(shared_bench):
    missing = {
        "from moorage.policy import palce": "Did you mean: 'place'?",
        "import moorage.policy.chioce": "did you mean 'moorage.policy.choice'?",
        "import moorag.policy": "did you mean 'moorage'?",
        "given = {'resources': {'gpus': 1}}\nreturn given['resourcse']": "mean: 'resources'?",
        "given = {'resources': {'gpus': 1}}\nreturn given['resources']['gpu']": "mean: 'gpus'?",
        "return input_data['cluster_dat']": "Did you mean: 'cluster_data'?",
        "return {}['nothing']": "KeyError: 'nothing'",
        "demand = None\nreturn demand.gpus": "then `read_demand` returns None, and `decline(",
    }
    for body, said in missing.items():
        code = shared_bench.policy(body, "misspelt")
        refusal = await fault_of(shared_bench, code, {"resources": {}, "cluster_data": {}})
        assert said in refusal.reason


@IN_ONE_LOOP
async def test_a_missing_key_of_input_data_lists_the_existing_keys(shared_bench):
    missing = {
        "return input_data['clustr_data']": "'clustr_data'. Did you mean: 'cluster_data'?",
        "return input_data['fleeet']": "'fleeet'. Did you mean: 'fleet'?",
        "return input_data['nodes']": "'nodes'. There are: 'inputs', 'cluster_data', ",
        "return [*input_data['cluster_data'].values()][0]['x']": "'x'. There are: 'data', 'clust",
    }
    for body, said in missing.items():
        code = shared_bench.policy(body, "misspelt")
        outcome = await shared_bench.outcome(code)
        assert said in outcome.refusal.reason


@IN_ONE_LOOP
async def test_the_error_about_a_missing_feature_of_cells_says_what_cells_lack(shared_bench):
    files, others = (
        "A cell has no files: put the content",
        "A cell has no network, no threads and no",
    )
    reaching = {
        "return open('/etc/passwd').read()": f"'/etc/passwd'. {files}",
        "import pathlib\nreturn pathlib.Path('table.json').read_text()": f"'table.json'. {files}",
        "import os\nreturn os.listdir('.')": files,
        "import os\nos.fork()": others,
        "import threading\nthreading.Thread(target=print).start()": f"new thread. {others}",
        "raise PermissionError('mine')": "the policy raised PermissionError: mine",
    }
    for body, said in reaching.items():
        refusal = await fault_of(shared_bench, shared_bench.policy(body, "reaching"))
        assert said in refusal.reason
        assert ("mine" in body) is ("A cell has" not in refusal.reason)
