"""Tests of the host, which runs a policy's examples, and checks values with a guard."""

import asyncio

import pytest

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Consult
from moorage.model import Ask, Cluster, ClusterId, Code, Node, NodeId, RequestId, Tenant
from moorage.policy import Fleet
from moorage.sandbox.host.sandbox import Document, Limits, PolicyCode, PolicyFault, Sample

IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


class World:
    """The services that the run of an example uses."""

    def __init__(self):
        self.called = asyncio.Event()

    async def call(self, client, method, arguments):
        del client, method, arguments
        self.called.set()
        return {}

    def at_hand(self, client, method, ids):
        del client, method, ids
        return {}

    def documents(self, cluster_ids):
        return [Document(name, 1, b"\x81\xa4data\x80") for name in cluster_ids]


def fleet(clusters):
    made = Fleet()
    nodes = tuple(Node(NodeId(f"n{n}"), 1000, 1000) for n in range(2))
    made.install(Cluster(ClusterId(f"c{c}"), nodes) for c in range(clusters))
    return made


def sample(code, number=1, inputs=None, clusters=2):
    tenant = Tenant(f"trial {number}")
    ask = Ask(RequestId(f"trial-{number}"), tenant, code.ref, inputs=inputs or {}, seed=number)
    return Sample(tenant, fleet(clusters), World(), Consult(ask, 1))


def plain(code, value, number=1):
    return Sample(Tenant(f"plain {number}"), fleet(1), World(), input_data=value)


async def outcomes(bench, code, *samples):
    checked = await asyncio.wait_for(bench.sandbox.check(code, samples), 60)
    assert checked.ok
    return checked.outcomes


async def test_an_example_is_evaluated_on_its_own_fleet_and_leaves_no_state(bench):
    code = bench.policy(
        "context['n'] = context.get('n', 0) + 1\n"
        "seen = [each['data'] for each in input_data['cluster_data'].values()]\n"
        "self.settings['cluster_client'].read_cluster('c0')\n"
        "return [context['n'], len(input_data['fleet'].feasible()), len(seen)]"
    )
    samples = [sample(code, 1, clusters=1), sample(code, 2, clusters=3)]
    found = await outcomes(bench, code, *samples)
    assert [each.value for each in found] == [[1, 2, 1], [1, 6, 3]]
    assert bench.registry.calls == bench.registry.fetched == []
    assert all(each.services.called.is_set() for each in samples)
    assert await bench.value(code) == [1, 4, 2], "examples change no context"


@IN_ONE_LOOP
async def test_examples_of_policies_that_rank_have_plain_input(shared_bench):
    code = shared_bench.policy("return [input_data, parameters]", parameters={"p": 1})
    (found,) = await outcomes(shared_bench, code, plain(code, [1, "x"]))
    assert found.value == [[1, "x"], {"p": 1}]


@IN_ONE_LOOP
async def test_an_error_in_one_example_does_not_affect_other_examples(shared_bench):
    code = shared_bench.policy("return 1 / input_data['inputs']['by']")
    samples = [sample(code, number, {"by": by}) for number, by in enumerate((1, 0, 2))]
    first, second, third = await outcomes(shared_bench, code, *samples)
    assert (first.value, third.value) == (1.0, 0.5)
    assert second.refusal.code is Code.POLICY_ERROR


@IN_ONE_LOOP
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("while True: pass", Code.POLICY_TIMEOUT),
        ("import os; os._exit(1)", Code.POLICY_CRASHED),
        ("import os; os.write(3, b'x' * 100)", Code.POLICY_CRASHED),
    ],
)
async def test_examples_after_a_crash_are_refused_with_its_reason(hasty_bench, body, code):
    bench = hasty_bench
    policy = bench.policy(body)
    found = await outcomes(bench, policy, *(sample(policy, number) for number in range(3)))
    assert [each.refusal.code for each in found] == [code] * 3
    assert await bench.value(bench.policy("return 1", "another")) == 1


async def test_examples_are_cancelled_when_the_sandbox_closes(make_bench):
    bench = await make_bench(limits=Limits(evaluation_seconds=30))
    code = bench.policy("self.settings['cluster_client'].read_cluster('c0')\nwhile True: pass")
    tried = sample(code)
    checking = asyncio.ensure_future(bench.sandbox.check(code, [tried]))
    await asyncio.wait_for(tried.services.called.wait(), 60)
    await bench.sandbox.close()
    (found,) = (await asyncio.wait_for(checking, 60)).outcomes
    assert found.refusal.code in {Code.SHUTTING_DOWN, Code.POLICY_CRASHED}


class Strict:
    """A guard that refuses some values."""

    def overrides(self, parameters, settings):
        if "no" in parameters:
            raise PolicyFault(Refusal(Code.BAD_MESSAGE, "not that", "parameters.no"))
        return {"filled": True, **parameters}, settings

    async def complete(self, input_data):
        if input_data == "never":
            raise PolicyFault(Refusal(Code.BAD_MESSAGE, "not that", "input_data"))
        return "completed" if input_data == "part" else input_data

    def command(self, action, data):
        if action != "yes":
            raise PolicyFault(Refusal(Code.BAD_MESSAGE, "not that", "action"))
        return {"data": data}

    def judge(self, value):
        return Refusal(Code.POLICY_BAD_OUTPUT, "not that") if value == "wrong" else None


def guard(policy):
    return PolicyCode(policy.ref, policy.files, guard=Strict())


async def test_the_host_checks_the_return_value_of_eval_by_the_schema(bench):
    code = guard(bench.policy("return input_data['inputs'].get('say')"))
    assert await bench.value(code, {"say": "right"}) == "right"
    refusal = await bench.refusal(code, {"say": "wrong"})
    assert refusal.code is Code.POLICY_BAD_OUTPUT
    assert bench.sandbox.report().counters["failures"] == 1


@IN_ONE_LOOP
async def test_the_host_checks_plain_evaluations_and_commands_by_the_schemas(shared_bench):
    policy = shared_bench.policy("return input_data or parameters")
    more = b"    def management(self, action, data): return [action, data]\n"
    files = {"function.py": policy.files["function.py"] + more}
    code = guard(PolicyCode(policy.ref, files))

    async def evaluate(given, **parameters):
        return await shared_bench.sandbox.evaluate(
            code, Tenant("t"), given, parameters=parameters, settings={}
        )

    assert await evaluate(None, p=1) == {"filled": True, "p": 1}
    assert await evaluate("part") == "completed"
    for wrong in (evaluate("wrong"), evaluate(None, no=1), evaluate("never")):
        with pytest.raises(PolicyFault, match="not that"):
            await wrong
    assert await shared_bench.sandbox.manage(code, Tenant("t"), "yes", 1) == ["yes", {"data": 1}]
    with pytest.raises(PolicyFault, match="not that"):
        await shared_bench.sandbox.manage(code, Tenant("t"), "no", 1)
