"""Tests of the input and the answers of policies in real cells."""

import asyncio
import random
import textwrap
from dataclasses import replace

import msgspec
import pytest

from moorage.model import ClusterId, Code, Demand, LeaseTerms, PolicyRef, Share, Tenant
from moorage.policy import parse_proposal
from moorage.sandbox.host.sandbox import Limits, PolicyFault
from moorage.sandbox.host.work import death_refusal
from moorage.sandbox.host.zygote import Death
from moorage.sandbox.wire.limits import CALL_ANSWER_BYTES_MAX

TERMS = LeaseTerms(ttl_seconds=60)
IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@IN_ONE_LOOP
async def test_a_policy_gets_the_documented_input(shared_bench):
    code = shared_bench.policy(
        """
data = input_data["cluster_data"]
entry = data["c0"]
return {
    "id": self.rule_id,
    "keys": sorted(input_data),
    "clusters": list(data),
    "entry": sorted(entry),
    "same": entry["metrics"] is entry["cluster_metrics"],
    "capacity": entry["capacity"]["n0"],
    "inputs": input_data["inputs"],
    "resources": input_data["resources"],
    "seed": input_data["seed"],
    "feasible": input_data["fleet"].feasible().tolist(),
    "settings": {k: v for k, v in self.settings.items() if len(k) == 1},
    "clients": sorted(k for k in self.settings if len(k) > 1),
    "parameters": parameters,
    "constructed_with": self.parameters,
    "context": context,
}
""",
        settings={"a": 1, "b": 1},
        parameters={"x": 1, "y": {"z": 1}},
    )
    value = await shared_bench.value(
        code,
        {"need": 3},
        candidates=(ClusterId("c0"),),
        demand=Demand(gpus=2, models=()),
        reserved=(("c0", "n0"),),
        settings={"b": 2},
        parameters={"x": 9},
        seed=7,
    )
    assert value == {
        "id": "rule:1-test",
        "keys": ["cluster_data", "inputs"],
        "clusters": ["c0"],
        "entry": ["cluster_metrics", "data", "metrics"],
        "same": True,
        "capacity": {
            "cpu_milli": 64000,
            "memory_mib": 64000,
            "gpus": {"0": 1000, "1": 1000, "2": 1000, "3": 1000},
        },
        "inputs": {"need": 3},
        "resources": {
            "gpus": 2,
            "gpu_milli": 1000,
            "models": [],
            "gpu_memory_mib": 0,
            "cpu_milli": 0,
            "memory_mib": 0,
            "nodes": 1,
            "topology": "",
        },
        "seed": 7,
        "feasible": [False, True, False, False],
        "settings": {"a": 1, "b": 2},
        "clients": [
            "block_metrics_api",
            "cluster_client",
            "cluster_metrics_api",
            "cluster_metrics_client",
            "context_client",
        ],
        "parameters": {"x": 9, "y": {"z": 1}},
        "constructed_with": {"x": 9, "y": {"z": 1}},
        "context": {},
    }
    plain = await shared_bench.value(code)
    assert plain["settings"] == {"a": 1, "b": 1}
    assert plain["clusters"] == ["c0", "c1"]
    assert plain["resources"] is None


async def test_cluster_data_behaves_like_a_dict_and_is_fetched_once(bench):
    code = bench.policy("""
import copy, json
data = input_data["cluster_data"]
assert isinstance(data, dict) and len(data) == 2 and "c1" in data and "c9" not in data
assert data.get("c9", 5) == 5
text = json.loads(json.dumps(data))
assert text == data and dict(data) == data and {**data} == data and copy.deepcopy(data) == text
assert sorted(data | {"x": 1}) == ["c0", "c1", "x"]
assert [v["data"]["id"] for v in data.values()] == ["c0", "c1"]
version = data["c0"]["data"]["version"]
data["c0"]["data"]["tags"].append("mutated")
data["c0"]["data"]["version"] = 99
data["c0"]["capacity"].clear()
del data["c1"]
return {"version": version, "tags": input_data["cluster_data"]["c0"]["data"]["tags"]}
""")
    for _ in range(3):  # No mutation reaches the next evaluation (class 90).
        assert await bench.value(code) == {"version": 1, "tags": ["a", "mutated"]}
    assert bench.registry.fetched == ["c0", "c1"]
    bench.registry.versions["c0"] = 2
    bench.sandbox.drop_documents("c0")
    assert (await bench.value(code))["version"] == 2
    assert bench.registry.fetched == ["c0", "c1", "c0"]


PLAIN = """
import copy, json, pickle, pprint
from collections import ChainMap, UserDict
from collections.abc import Mapping
def seen(**given): return sorted(given)
for given, names in (
    (input_data, ["cluster_data", "inputs"]),
    (input_data["cluster_data"], ["c0", "c1"]),
    (input_data["cluster_data"]["c0"], ["cluster_metrics", "data", "metrics"]),
):
    text = json.loads(json.dumps(given, sort_keys=True, indent=1))
    assert isinstance(given, dict) and isinstance(given, Mapping)
    assert type(given) == dict and dict == type(given) and type(given) in (list, dict)
    assert type(given) != list and str(type(given)) == "<class 'dict'>"
    copies = [
        copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given)), given.copy(),
        dict(given), {**given}, given | {}, {} | given, dict(given.items()), dict(UserDict(given)),
        dict(ChainMap({}, given)), dict(zip(given.keys(), given.values())),
        {k: given[k] for k in given},
    ]
    for each in copies:
        assert type(each) is dict and each == text == given, each
    assert all(type(each) is dict for each in copies[1].values() if isinstance(each, dict))
    assert seen(**given) == sorted(given) == names == sorted(given.keys())
    assert len(given) == len(names)
    assert eval(repr(given)) == eval(f"{given}") == eval(pprint.pformat(given)) == text
    match given:
        case {**rest}:
            assert rest == text
assert input_data["fleet"] is input_data.get("fleet") and "fleet" in input_data
assert input_data["cluster_data"]["c0"].get("capacity")["n0"]["gpus"] == dict.fromkeys("0123", 1000)
try:
    input_data["fleets"]
except KeyError as error:
    assert error.args == ("fleets",)
context["last"] = input_data
assert input_data.pop("seed") == 5 and input_data.pop("seed", 6) == 6 and "seed" not in input_data
return {"allowed": True, "input_data": input_data, "metrics": input_data["cluster_data"]["c0"]}
"""


@IN_ONE_LOOP
async def test_input_data_is_plain_json_and_added_values_are_read_by_key(shared_bench):
    """Existing policies log, copy and return their input, whole or in part."""
    value = await shared_bench.value(shared_bench.policy(PLAIN), {"n": [1]}, seed=5)
    assert value["input_data"].keys() == {"cluster_data", "inputs"}
    assert value["input_data"]["inputs"] == {"n": [1]}
    assert value["metrics"] == value["input_data"]["cluster_data"]["c0"]
    again = shared_bench.policy("return [input_data, context]")
    assert await shared_bench.value(again) == [{**value["input_data"], "inputs": {}}, {}]


@IN_ONE_LOOP
async def test_clients_of_a_policy_return_and_raise_as_documented(shared_bench):
    code = shared_bench.policy("""
clusters, metrics = self.settings["cluster_client"], self.settings["cluster_metrics_client"]
out = {"tuple": type(clusters.read_cluster("c0")).__name__}
out["read"] = clusters.read_cluster("c0")
out["query"] = clusters.execute_query({"id": "c0"})
out["missing"] = clusters.read_cluster("missing")
out["broken"] = clusters.read_cluster("broken")
out["metrics"] = metrics.get_cluster("c1")
out["all"] = metrics.query_clusters()
try:
    metrics.get_cluster("missing")
except Exception as error:
    out["error"] = [type(error).__name__, str(error), error.status]
return out
""")
    value = await shared_bench.value(code)
    assert value["tuple"] == "tuple"
    assert value["read"] == [True, {"client": "cluster_client", "arguments": ["c0"]}]
    assert value["query"][1]["arguments"] == [{"id": "c0"}]
    assert value["missing"] == [False, "HTTP error occurred: 404 Not Found"]
    assert value["broken"] == [False, "Error occurred: the service failed (RuntimeError)"]
    assert value["metrics"] == {"client": "cluster_metrics_client", "arguments": ["c1"]}
    assert value["all"]["arguments"] == [None]
    assert value["error"] == ["APIError", "404 Not Found", 404]


@pytest.mark.parametrize(
    "caught",
    [
        "requests.RequestException",
        "requests.exceptions.HTTPError",
        "ValueError",
        "APIError",
        "client.APIError",
        "Documented",
    ],
)
@IN_ONE_LOOP
async def test_metrics_client_raises_the_documented_exceptions(shared_bench, caught):
    code = shared_bench.policy(
        f"""
import requests
from aios.clients.metrics import APIError as Documented
client = self.settings["cluster_metrics_client"]
found = []
for name in ("missing", "broken", "../c0"):
    try:
        client.get_cluster(name)
    except {caught} as error:
        found.append([str(error), error.response and error.response.status_code])
return found
""",
        f"catches {caught}",
    )
    assert await shared_bench.value(code) == [
        ["404 Not Found", 404],
        ["the service failed (RuntimeError)", None],
        ["expected a cluster id: letters, digits, '.', '_', ':' and '-'", None],
    ]


async def test_a_cell_returns_documents_in_its_memory_without_a_request_to_the_host(make_bench):
    bench = await make_bench(limits=Limits(calls_max=4, calls_per_candidate_max=0))
    code = bench.policy("""
client = self.settings["cluster_client"]
return [client.read_cluster(each) for each in ("c0", "../c0", "c1", "c" * 300, "big")]
""")
    bench.registry.packed = {
        "c0": msgspec.msgpack.encode({"id": "c0"}),
        "../c0": msgspec.msgpack.encode("a breach"),
        "big": msgspec.msgpack.encode("five are too many"),
    }
    value = await bench.value(code)
    assert value[0] == [True, {"id": "c0"}]
    assert "expected a cluster id" in value[1][1]
    assert value[1] == value[3]
    assert value[2] == [True, {"client": "cluster_client", "arguments": ["c1"]}]
    assert value[4] == [False, "Error occurred: more than 4 calls in one evaluation"]
    assert bench.registry.calls == [("cluster_client", "read_cluster", ("c1",))]
    bench.registry.packed["c0"] = bytes(CALL_ANSWER_BYTES_MAX + 1)
    bench.sandbox.drop_documents("c0")
    assert "request less data" in (await bench.value(code))[0][1]


async def test_a_policy_can_catch_errors_of_too_many_calls(make_bench):
    bench = await make_bench(limits=Limits(calls_max=10, calls_per_candidate_max=0))
    code = bench.policy("""
clusters, metrics = self.settings["cluster_client"], self.settings["cluster_metrics_client"]
found = [clusters.read_cluster("missing")[1] for _ in range(5000)]
try:
    metrics.get_cluster("c1")
except APIError as error:
    found.append(str(error))
try:
    input_data["cluster_data"]["c1"]["data"]
except OSError as error:
    found.append(str(error))
return [found[9], found[10], *found[-3:]]
""")
    beyond = "more than 10 calls in one evaluation"
    for evaluations in (1, 2):  # Each evaluation has its own limit.
        assert await bench.value(code) == [
            "HTTP error occurred: 404 Not Found",
            f"Error occurred: {beyond}",
            f"Error occurred: {beyond}",
            beyond,
            f"cluster documents could not be read: {beyond}",
        ]
        assert bench.sandbox.report().counters["calls"] == 11 * evaluations
    assert "protocol_breaches" not in bench.sandbox.report().counters


async def test_a_cell_caches_documents_until_they_change(make_bench):
    limits = Limits(calls_max=1, calls_per_candidate_max=0, evaluation_seconds=5.0)
    bench = await make_bench(limits=limits)
    code = bench.policy(
        "client = self.settings['cluster_client']\n"
        "return [client.read_cluster('c0') for _ in range(2)]"
    )

    def change(version):
        bench.registry.packed["c0"] = msgspec.msgpack.encode({"version": version})
        bench.sandbox.drop_documents("c0")

    for version in (1, 2):
        change(version)
        for _ in range(2):  # At most one call may reach the host; more would be refused.
            assert await bench.value(code) == [[True, {"version": version}]] * 2
    change(3)
    plain = await bench.sandbox.evaluate(code, Tenant("t"), {}, parameters={}, settings={})
    # Only consultations carry changes, so plain evaluations do not use the cache.
    assert plain[0] == [True, {"version": 3}]
    assert plain[1] == [False, "Error occurred: more than 1 calls in one evaluation"]
    assert await bench.value(code) == [[True, {"version": 3}]] * 2


async def test_a_fixed_hash_seed_makes_the_order_of_sets_repeatable(make_bench):
    hashes = []
    for seed in (1, 1, 2):
        bench = await make_bench(limits=Limits(hash_seed=seed))
        hashes.append(await bench.value(bench.policy("return str(hash('text'))")))
    assert hashes[0] == hashes[1] != hashes[2]


async def test_waiting_for_a_service_pauses_the_deadline_for_a_limited_time(make_bench):
    bench = await make_bench(limits=Limits(evaluation_seconds=1.0, calls_seconds=1.5))
    code = bench.policy("return list(self.settings['cluster_client'].read_cluster('c0'))")
    bench.registry.hold = asyncio.Event()
    value = await bench.value(code)
    assert value == [False, "Error occurred: the service took too long"]


async def test_a_context_is_stored_per_policy_and_tenant_and_a_failure_does_not_change_the_context(
    hasty,
):
    bench = hasty
    code = bench.policy("""
context["count"] = context.get("count", 0) + 1
mode = input_data["inputs"].get("mode")
if mode == "raise": raise ValueError("no")
if mode == "loop":
    while True: pass
if mode == "bad": context["bad"] = object()
if mode == "big": context["big"] = "x" * 300_000
return context["count"]
""")
    counts = await asyncio.gather(*[bench.value(code) for _ in range(5)])
    assert counts == [1, 2, 3, 4, 5]
    assert await bench.value(code, tenant=Tenant("other")) == 1  # Class 88.
    for mode, expected in [
        ("raise", Code.POLICY_ERROR),
        ("bad", Code.POLICY_ERROR),
        ("big", Code.POLICY_ERROR),
        ("loop", Code.POLICY_TIMEOUT),
    ]:
        assert (await bench.refusal(code, {"mode": mode})).code == expected
    assert await bench.value(code) == 6
    assert await bench.value(code, tenant=Tenant("other")) == 2
    twin = type(code)(type(code.ref)("twin:1-test", code.ref.digest), code.files)
    assert await bench.value(twin) == 1  # The same code under another name is another policy.
    more = [bench.value(code, tenant=Tenant(f"t{n}")) for n in range(400)]
    assert await asyncio.gather(*more) == [1] * 400
    more = [bench.value(code, tenant=Tenant(f"t{n}")) for n in range(400)]
    assert await asyncio.gather(*more) == [2] * 400


@IN_ONE_LOOP
@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ("raise KeyError('x')", Code.POLICY_ERROR, "raised KeyError: 'x' (function.py, line 6)"),
        ("return {'a': {'b': [1, float('nan')]}}", Code.POLICY_BAD_OUTPUT, ".a.b[1]"),
        ("import requests; requests.get('x')", Code.POLICY_ERROR, "'requests' is not"),
        ("x = bytearray(1 << 33)", Code.POLICY_MEMORY, "MemoryError"),
    ],
)  # fmt: skip
async def test_a_failure_reports_the_policys_error_and_its_line(shared_bench, body, code, reason):
    refusal = await shared_bench.refusal(shared_bench.policy(body))
    assert refusal.code == code
    assert reason in refusal.reason
    assert refusal.details["policy_rule_uri"] == "rule:1-test"


@IN_ONE_LOOP
async def test_numpy_values_and_tuples_are_answers(shared_bench):
    code = shared_bench.policy("""
import numpy as np
fleet = input_data["fleet"]
return {"gpus": (np.int64(1), 2), "free": fleet.gpu_free.sum(1), "x": np.float64(0.5), 3: True}
""")
    value = await shared_bench.value(code)
    assert value == {"gpus": [1, 2], "free": [4000] * 4, "x": 0.5, "3": True}


async def test_requests_in_one_cell_at_the_same_time_do_not_propose_the_same_gpu(bench):
    code = bench.first_fit()
    demand = Demand(gpus=1)
    futures = [bench.ask(code, demand=demand, terms=TERMS) for _ in range(17)]
    values = [(await future).value for future in futures]
    placed = [(v["cluster_id"], v["node_id"], v["gpus"][0]) for v in values[:16]]
    assert len(set(placed)) == 16
    assert values[16] == {"none": True}
    for number in range(1, 18):
        bench.sandbox.settle(f"r{number}", granted=False)
    again = await bench.value(code, demand=demand, terms=TERMS)
    assert again["gpus"] == ["0"]
    # Advice and dry runs hold nothing.
    for fields in ({}, {"terms": TERMS, "dry_run": True}):
        first = await bench.value(code, demand=demand, **fields)
        assert first == await bench.value(code, demand=demand, **fields)


async def test_the_view_of_a_cell_in_a_process_is_the_fleet_minus_outstanding_proposals(bench):
    """The random test of `test_replica`, with frames, pipes and a real cell."""
    code = bench.policy("""
import random
fleet, rng = input_data["fleet"], random.Random(input_data["seed"])
seen = [fleet.cpu_free.tolist(), fleet.memory_free.tolist(), fleet.gpu_free.tolist()]
rows = fleet.feasible().nonzero()[0].tolist()
proposal = fleet.placement(rng.choice(rows)) if rows else {}
return {**proposal, "seen": seen}
""")
    rng = random.Random(5)
    demand = Demand(gpus=1, gpu_milli=250, cpu_milli=1000, memory_mib=100)
    outstanding: dict[str, Share] = {}
    leases: list[Share] = []
    truth = bench.fleet
    for number in range(400):
        while leases and rng.random() < 0.3:
            truth.give(leases.pop(rng.randrange(len(leases))))
        while outstanding and rng.random() < 0.4:
            request = rng.choice(list(outstanding))
            share = outstanding.pop(request)
            granted = rng.random() < 0.6 and truth.feasible(demand)[truth.row("c0", "n0")]
            if granted:
                truth.take(share)
                leases.append(share)
            bench.sandbox.settle(request, granted=bool(granted))
        value = await bench.value(
            code, demand=demand, terms=TERMS, seed=number, request=f"q{number}"
        )
        for share in outstanding.values():
            truth.take(share)
        expected = [truth.cpu_free.tolist(), truth.memory_free.tolist(), truth.gpu_free.tolist()]
        for share in outstanding.values():
            truth.give(share)
        assert value.pop("seen") == expected, number
        if value:
            (ask_message,) = parse_proposal(value, demand)
            outstanding[f"q{number}"] = ask_message.share()


@IN_ONE_LOOP
async def test_the_check_of_a_policy_names_file_and_line_and_column_of_an_error(shared_bench):
    def code(**files):
        policy = shared_bench.policy("return 1")
        named = {name.replace("__", "."): text.encode() for name, text in files.items()}
        return type(policy)(policy.ref, {**policy.files, **named})

    good = await shared_bench.sandbox.check(shared_bench.policy("return 1"))
    assert good.ok
    assert not good.management
    result = await shared_bench.sandbox.check(code(function__py="x = 1\ndef f(:\n    pass\n"))
    (finding,) = result.findings
    assert (finding.file, finding.line, finding.column) == ("function.py", 2, 7)
    assert finding.text == "def f(:\n      ^"
    result = await shared_bench.sandbox.check(code(function__py="import openai\n"))
    assert "there is no class AIOSv1PolicyRule" in result.findings[0].message
    assert "function.py line 1: 'openai' is not available" in result.warnings[0]
    result = await shared_bench.sandbox.check(code(function__py="class Other: pass"))
    assert result.findings[0].message == "there is no class AIOSv1PolicyRule; it has Other"
    result = await shared_bench.sandbox.check(code(function__py="def f():\n\tx = = 1\n"))
    assert result.findings[0].text == "\tx = = 1\n\t    ^"
    wrong = "class AIOSv1PolicyRule:\n    def __init__(self, rule_id): pass\n"
    result = await shared_bench.sandbox.check(code(function__py=wrong))
    assert [f.line for f in result.findings] == [2, 0]
    result = await shared_bench.sandbox.check(code(function__py=f"x = {'1 + ' * 50_000}\n"))
    assert len(result.findings[0].text) <= 900
    source = shared_bench.policy("return 1").files["function.py"].decode()
    for how in ("async def eval", "def eval"):
        body = "return 1" if how.startswith("async") else "yield 1"
        changed = source.replace("def eval", how).replace("return 1", body)
        result = await shared_bench.sandbox.check(code(function__py=changed))
        assert "without async and yield" in result.findings[0].message
        assert result.findings[0].line == 5
    result = await shared_bench.sandbox.check(code(helper__py="x = ("))
    assert result.findings[0].file == "helper.py"
    broken = code(
        function__py=textwrap.dedent("""\
        class AIOSv1PolicyRule:
            def __init__(self, rule_id, settings, parameters):
                self.limit = {}["limit"]
            def eval(self, parameters, input_data, context): return 1
            def management(self, action, data): return 1
        """)
    )
    result = await shared_bench.sandbox.check(broken)
    assert result.findings[0].message == "KeyError: 'limit'"
    assert result.findings[0].line == 3
    assert result.management


@IN_ONE_LOOP
async def test_a_policy_can_import_its_own_other_files(shared_bench):
    policy = shared_bench.policy(
        "import helper, pack.deep\nreturn [helper.X, pack.deep.Y, helper.Z]"
    )
    files = {
        **policy.files,
        "helper.py": b"from pack.deep import Y as Z\nX = 1",
        "pack/__init__.py": b"",
        "pack/deep.py": b"from . import other\nY = other.W",
        "code/pack/other.py": b"W = 2",
    }
    assert await shared_bench.value(type(policy)(policy.ref, files)) == [1, 2, 2]


@IN_ONE_LOOP
async def test_management_returns_its_answer_or_names_its_error(shared_bench):
    policy = shared_bench.policy(
        "return 1\n\ndef management(self, action, data):\n    return [action, data]"
    )
    source = policy.files["function.py"].replace(b"        def man", b"    def man")
    policy = type(policy)(policy.ref, {"function.py": source})
    assert await shared_bench.sandbox.manage(policy, Tenant("t"), "state", {"a": 1}) == [
        "state",
        {"a": 1},
    ]
    with pytest.raises(PolicyFault) as caught:
        await shared_bench.sandbox.manage(shared_bench.policy("return 2"), Tenant("t"), "state", {})
    assert caught.value.refusal.code == Code.UNSUPPORTED


@IN_ONE_LOOP
@pytest.mark.parametrize(
    "change",
    ["self.parameters['a'].append(2)", "self.parameters = 5", "del self.parameters['a']"],
)
async def test_management_that_fails_changes_nothing(shared_bench, change):
    body = f"return self.parameters\n\ndef management(self, action, data):\n    {change}\n    1 / 0"
    policy = shared_bench.policy(body, parameters={"a": [1]})
    source = policy.files["function.py"].replace(b"        def man", b"    def man")
    policy = replace(policy, files={"function.py": source})
    assert await shared_bench.value(policy) == {"a": [1]}
    with pytest.raises(PolicyFault, match="ZeroDivisionError"):
        await shared_bench.sandbox.manage(policy, Tenant("t"), "state", {})
    assert await shared_bench.value(policy) == {"a": [1]}


@IN_ONE_LOOP
async def test_output_of_a_policy_is_stored_up_to_a_limit(shared_bench):
    code = shared_bench.policy("""
import logging
print("printed"); logging.getLogger("mine").info("logged"); print("x" * input_data["inputs"]["n"])
return 1
""")
    await shared_bench.value(code, {"n": 10})
    output = shared_bench.sandbox.output(code.ref, Tenant("t"))["requests"]
    assert output.startswith("printed\nINFO mine: logged\nxxxxxxxxxx\n")
    for _ in range(30):
        await shared_bench.value(code, {"n": 1_000_000})
    assert len(shared_bench.sandbox.output(code.ref, Tenant("t"))["requests"]) == 64 << 10
    assert (
        "more characters were dropped"
        in shared_bench.sandbox.output(code.ref, Tenant("t"))["requests"]
    )


@pytest.mark.parametrize(
    ("held_mib", "code"), [(10, Code.POLICY_CRASHED), (200, Code.POLICY_MEMORY)]
)
def test_the_refusal_of_a_cell_that_exceeds_its_memory_limit_names_the_limit(held_mib, code):
    death = Death("killed by SIGSEGV", held_mib=held_mib)
    refusal = death_refusal(death, PolicyRef("rule:1-x", "digest"), Limits())
    assert refusal.code is code
    assert ("policy_memory_mib" in refusal.reason) == (code is Code.POLICY_MEMORY)
    assert refusal.details["cause"] == "killed by SIGSEGV"
