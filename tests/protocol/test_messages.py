"""Tests of the reader of messages: the accepted messages, and an error for each other input."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from moorage import model
from moorage.model import Code
from moorage.protocol.diagnosis import expectations, required_fields
from moorage.protocol.errors import BadMessage
from moorage.protocol.json_bounds import PARTS_MAX
from moorage.protocol.messages import (
    OPERATIONS,
    AllocationRequest,
    BlockRequest,
    FleetListing,
    LeaseListing,
    Release,
    WhatIf,
    Why,
    decode,
    decode_allocation,
    decode_and_warn,
    ignored_fields,
    operation_of,
)
from moorage.records import fields

SAMPLE = {
    "adhoc": True,
    "policy_rule_uri": "",
    "clusters": [],
    "inputs": {},
    "filter": {},
    "search": {},
    "parameters": {},
    "settings": {},
}
"""The payload of the documents' own example client."""


def text(**changes: Any) -> str:
    return json.dumps({"adhoc": True, "policy_rule_uri": "p:1-a", "inputs": {}, **changes})


def refusal_of(frame: str | bytes) -> BadMessage:
    with pytest.raises(BadMessage) as caught:
        decode(frame)
    return caught.value


def ask(frame: str | bytes) -> AllocationRequest:
    message = decode(frame)
    assert isinstance(message, AllocationRequest)
    return message


# What kind of message ------------------------------------------------------------------------


@pytest.mark.parametrize("adhoc", [True, 1, "yes", [0], {"a": 1}, 0.5])
def test_any_truthy_adhoc_is_an_allocation_request(adhoc: Any) -> None:
    assert ask(text(adhoc=adhoc)).policy_rule_uri == "p:1-a"


@pytest.mark.parametrize("adhoc", [False, 0, "", None, [], {}])
def test_a_falsy_adhoc_counts_as_missing(adhoc: Any) -> None:
    error = refusal_of(text(adhoc=adhoc))
    assert error.code is Code.MISSING_FIELDS
    assert error.reason == "Missing required fields: adhoc"
    assert decode(text(adhoc=adhoc, input={"b": 1})) == BlockRequest(input={"b": 1})


def test_a_block_request_is_read() -> None:
    assert decode('{"input": {"a": 1}}') == BlockRequest(input={"a": 1}, mode="dry_run")
    assert decode('{"input": {}, "mode": "select_clusters", "x": 0}') == BlockRequest(
        input={}, mode="select_clusters"
    )
    assert refusal_of('{"input": {}, "mode": "other"}').field == "mode"
    assert refusal_of('{"input": 5}').reason == "input: expected an object"


def test_every_operation_has_its_name() -> None:
    names = (
        "release renew flush status why cancel queue leases fleet manage logs exec files whatif "
        "watch resume cordon drain uncordon forget set_quota remove_quota quotas "
        "decisions decision_fleet past_fleet reserve unreserve reservations"
    )
    assert sorted(OPERATIONS) == sorted(names.split())


@pytest.mark.parametrize("op", ["releas", "", 5, {}, "RELEASE", "x" * 100_000])
def test_the_error_for_an_unknown_op_lists_the_known_ones(op: Any) -> None:
    error = refusal_of(json.dumps({"op": op, "id": 3}))
    assert (error.code, error.field, error.id) == (Code.UNKNOWN_OP, "op", 3)
    assert error.details["known"] == list(OPERATIONS)
    assert all(name in error.expected for name in OPERATIONS)


def test_a_misspelt_operation_or_field_gets_a_suggestion() -> None:
    assert refusal_of('{"op": "relase"}').reason.endswith("(did you mean release?)")
    assert refusal_of(text(resources={"gpu": 1})).reason.endswith("(did you mean gpus?)")
    quota = '{"op": "set_quota", "tenant": "ann", "gpus": 4}'
    assert refusal_of(quota).reason.endswith("(did you mean nominal.gpu_milli?)")
    condition = {"key": "zone", "operator": "in", "values": ["a"]}
    assert refusal_of(text(resources={"where": [condition]})).reason.endswith("(did you mean In?)")
    plain = text(resources={"where": ["zone=a"]})
    assert refusal_of(plain).reason.endswith("[0]: expected an object with key, operator, values")
    for wrong, meant in (("nvlnk", " (did you mean nvlink?)"), ("blue", ""), ("x" * 9_999, "")):
        reason = refusal_of(text(resources={"topology": wrong})).reason
        assert reason.endswith(f'"rack", "zone" or ""{meant}')


# Missing fields ------------------------------------------------------------------------------


def test_a_single_error_names_all_missing_fields() -> None:
    error = refusal_of("{}")
    assert error.reason == (
        "Missing required fields: adhoc, policy_rule_uri, inputs. An operation names `op` instead,"
        " such as status or release, and a block `input`."
    )
    assert error.details["missing"] == ["adhoc", "policy_rule_uri", "inputs"]
    assert error.details["known"] == list(OPERATIONS)
    assert refusal_of(text(adhoc=None)).reason == "Missing required fields: adhoc"
    assert (
        refusal_of('{"adhoc": true}').reason == "Missing required fields: policy_rule_uri, inputs"
    )


def test_the_documented_sample_lacks_only_its_policy() -> None:
    error = refusal_of(json.dumps(SAMPLE))
    assert error.code is Code.MISSING_FIELDS
    assert error.reason == "Missing required fields: policy_rule_uri"


def test_the_documented_sample_with_a_policy_is_read() -> None:
    message = ask(json.dumps({**SAMPLE, "policy_rule_uri": "p:1-a"}))
    assert message == AllocationRequest(policy_rule_uri="p:1-a", inputs={})


@pytest.mark.parametrize("value", [None, ""])
def test_null_and_empty_values_count_as_missing_where_a_value_is_required(value: Any) -> None:
    error = refusal_of(text(policy_rule_uri=value, id="a"))
    assert (error.code, error.field, error.id) == (Code.MISSING_FIELDS, "policy_rule_uri", "a")
    assert refusal_of(text(inputs=None)).details["missing"] == ["inputs"]
    assert refusal_of(json.dumps({"op": "renew", "lease": value})).details["missing"] == [
        "lease",
        "token",
    ]


def test_the_error_names_the_path_of_a_missing_inner_field() -> None:
    error = refusal_of('{"op": "whatif", "request": {"policy_rule_uri": "p"}}')
    assert (error.code, error.field) == (Code.MISSING_FIELDS, "request.inputs")
    assert refusal_of(text(provision={"spec": {}})).field == "provision.backend"


def test_a_message_over_http_need_not_have_adhoc() -> None:
    body = b'{"policy_rule_uri": "p:1-a", "inputs": {"a": 1}}'
    assert decode_allocation(body).inputs == {"a": 1}
    with pytest.raises(BadMessage, match=r"^Missing required fields: policy_rule_uri$"):
        decode_allocation('{"inputs": {}}')


# Missing, empty and null ---------------------------------------------------------------------


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_and_null_optional_fields_count_as_missing(empty: Any) -> None:
    message = ask(text(filter=empty, search=empty, parameters=empty, settings=empty))
    assert message == ask(text())
    assert (message.filter, message.search) == (None, None)
    assert (message.parameters, message.settings) == (None, None)


@pytest.mark.parametrize("empty", [None, []])
def test_an_empty_list_of_clusters_counts_as_missing(empty: Any) -> None:
    assert ask(text(clusters=empty)).candidates() is None


def test_the_clusters_of_a_request_become_distinct_texts_in_order() -> None:
    assert ask(text(clusters=["b", 7, "a", "7", "b"])).candidates() == ("b", "7", "a")


def test_filter_and_search_are_passed_on_unchanged() -> None:
    wild = {"header": {}, "body": {"values": {"matchType": "cluster"}}}
    message = ask(text(filter=wild, search=wild))
    assert message.filter == wild
    assert message.search == wild


def test_unknown_keys_of_a_request_are_ignored_with_a_warning() -> None:
    message = ask(text(block_id="b-1", whatever=[1, {}]))
    assert message == ask(text())
    assert ignored_fields(text(), message) == []
    assert len(ignored_fields(text(block_id="b-1", whatever=[1, {}]), message)) == 2
    many = ignored_fields(text(**{f"x{number}": 0 for number in range(100)}), message)
    assert (len(many), many[-1]) == (21, "80 more unknown fields were ignored.")
    (long,) = ignored_fields(text(**{"y" * 10_000: 0}), message)
    assert len(long) < 120


def warnings_on(**more: Any) -> list[str]:
    return ignored_fields(text(**more), ask(text(**more)))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("wait", "lease.wait_seconds"),
        ("waitSeconds", "lease.wait_seconds"),
        ("priority", "lease.priority"),
        ("ttl", "lease.ttl_seconds"),
        ("idempotency_key", "lease.idempotency_key"),
        ("gpus", "resources.gpus"),
        ("gpu", "resources.gpus"),
        ("memory", "resources.memory_mib"),
        ("backend", "provision.backend"),
        ("leese", "lease"),
        ("cluster", "clusters"),
        ("policy", "policy_rule_uri"),
        ("deadline", "deadline_seconds"),
    ],
)
def test_a_misplaced_field_gets_a_hint_with_the_right_place(name: str, meant: str) -> None:
    assert warnings_on(**{name: 1}) == [
        f"{name}: unknown field, it was ignored (did you mean {meant}?)."
    ]


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({}, "resources: they request nothing; give `gpus`, `cpu_milli` or `memory_mib`."),
        ({"gpu_milli": 500}, "resources.gpu_milli: the request has no GPUs; give a number, "),
        ({"models": ["A100"], "cpu_milli": 1}, "resources.models: the request has no GPUs; "),
        ({"gpus": 1, "gpu_milli": 500}, ""),
        ({"memory_mib": 1}, ""),
        (None, ""),
    ],
)
def test_empty_resources_yield_a_warning(resources: Any, said: str) -> None:
    _, warnings = decode_and_warn(text(resources=resources))
    assert [each[: len(said)] for each in warnings] == [said] * bool(said)
    assert warnings_on(resources=resources) == warnings
    assert len(warnings_on(resources=resources, zzz=1)) == 1 + bool(said)


def test_a_strict_request_refuses_unknown_fields() -> None:
    assert warnings_on(strict=True) == []
    with pytest.raises(BadMessage, match=r"^wait: unknown field; .*mean lease\.wait_seconds") as no:
        warnings_on(strict=True, wait=5, id="a")
    assert (no.value.code, no.value.field, no.value.id) == (Code.BAD_MESSAGE, "wait", "a")
    block = json.dumps({"input": {}, "modus": "dry_run", "strict": True})
    with pytest.raises(BadMessage, match=r"^modus: unknown field; .*mean mode"):
        ignored_fields(block, decode(block))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("strict", [True, False])
def test_operations_accept_strict_and_refuse_unknown_fields(name: str, strict: bool) -> None:
    samples: dict[str, Any] = {"topics": ["leases"], "command": ["true"], "starts_at": 1}
    samples |= {"ends_at": 2, "at": 1, "resources": {}, "policy_rule_uri": "p:1"}
    needed = required_fields(OPERATIONS[name])
    body = {field: samples.get(field, "x") for field in needed}
    body |= {"lease": "x"} if name in {"status", "why"} else {}
    assert decode(json.dumps({"op": name, "strict": strict, **body})).strict is strict
    with pytest.raises(BadMessage, match=r"^zzz: unknown field"):
        decode(json.dumps({"op": name, "strict": strict, "zzz": 1, **body}))


NEARLY_DRY = "dryrun dryRun DRY_RUN dry-run dry_runn dyr_run drt_run ry_run dry__run dry_rum"


@pytest.mark.parametrize("name", [*NEARLY_DRY.split(), "dry run"])
def test_a_misspelt_dry_run_is_always_refused(name: str) -> None:
    for value in (True, False, 1):
        with pytest.raises(BadMessage, match=r"did you mean dry_run\?") as no:
            warnings_on(**{name: value, "lease": {}})
        assert (no.value.code, no.value.field) == (Code.BAD_MESSAGE, name)


@pytest.mark.parametrize(
    "wrong", [{"dry": True}, {"drun": 1}, {"mode": "dry_run"}, {"mode": "dry-run"}]
)
def test_a_misspelt_dry_run_gets_no_lease(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadMessage, match=r"unknown field; .*did you mean dry_run\?"):
        warnings_on(**wrong, lease={})
    assert warnings_on(**wrong), "without a lease, the answer is advice anyway"


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"gpus": 0.5}, 'for a share of one GPU give "gpus": 1 and "gpu_milli": 500'),
        ({"gpus": 1.5}, 'for a share of one GPU give "gpus": 1 and "gpu_milli": N'),
        ({"gpus": 1, "cpu_milli": 1.5}, "1.5 of it is 1500"),
        ({"gpus": 1, "gpu_milli": 0.25}, "0.25 of it is 250"),
        ({"cpus": 4}, "did you mean cpu_milli?"),
        ({"memory": 4}, "did you mean memory_mib?"),
        ({"gpu_model": "A100"}, "did you mean models?"),
        ({"clusters": ["c"]}, "did you mean clusters?"),
        ({"clusters": "c"}, "did you mean clusters?"),
        ({"ttl_seconds": 5}, "did you mean lease.ttl_seconds?"),
    ],
)
def test_an_unreadable_amount_names_the_field_to_use_instead(
    resources: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(text(resources=resources))
    assert said in caught.value.reason


# Demands -------------------------------------------------------------------------------------


def test_the_fields_resources_and_lease_reach_the_core_unchanged() -> None:
    resources = {
        "gpus": 2,
        "gpu_milli": 500,
        "models": ["A100", "H100"],
        "gpu_memory_mib": 1,
        "cpu_milli": 2,
        "memory_mib": 3,
        "nodes": 4,
        "topology": "rack",
    }
    lease = {
        "ttl_seconds": 60,
        "wait_seconds": 5.5,
        "priority": -3,
        "preemptible": True,
        "idempotency_key": "k",
    }
    message = ask(text(resources=resources, lease=lease))
    assert message.demand() == model.Demand(
        gpus=2,
        gpu_milli=500,
        models=("A100", "H100"),
        gpu_memory_mib=1,
        cpu_milli=2,
        memory_mib=3,
        nodes=4,
        topology="rack",
    )
    assert message.terms() == model.LeaseTerms(
        ttl_seconds=60.0, wait_seconds=5.5, priority=-3, preemptible=True, idempotency_key="k"
    )


def test_defaults_are_as_documented() -> None:
    message = ask(text(resources={}, lease={}))
    assert message.demand() == model.Demand()
    assert message.terms() == model.LeaseTerms(ttl_seconds=300.0)
    assert ask(text()).demand() is None
    assert ask(text(resources=None, lease=None, provision=None)).terms() is None


def test_the_field_provision_reaches_the_core() -> None:
    message = ask(text(provision={"backend": "local", "spec": {"command": ["true"]}}))
    assert message.provisioning() == model.Provision("local", {"command": ["true"]})
    assert ask(text()).provisioning() is None


UNSHOWN = "no control, zero-width or bidirectional character"
WRONG = [
    ({"resources": 5}, "resources", "an object with gpus, gpu_milli"),
    ({"resources": {"gpus": -1}}, "resources.gpus", "between 0 and 1024"),
    ({"resources": {"gpus": 1025}}, "resources.gpus", "between 0 and 1024"),
    ({"resources": {"gpus": 1.5}}, "resources.gpus", "a whole number"),
    ({"resources": {"gpus": True}}, "resources.gpus", "a whole number"),
    ({"resources": {"gpus": 10**30}}, "resources.gpus", "between 0 and 1024"),
    ({"resources": {"gpu_milli": 0}}, "resources.gpu_milli", "between 1 and 1000"),
    ({"resources": {"gpu_milli": 1001}}, "resources.gpu_milli", "between 1 and 1000"),
    ({"resources": {"nodes": 0}}, "resources.nodes", "between 1 and 1024"),
    ({"resources": {"nodes": 1025}}, "resources.nodes", "between 1 and 1024"),
    ({"resources": {"models": "A100"}}, "resources.models", "a list of at most 64 GPU models"),
    ({"resources": {"models": ["a", 5]}}, "resources.models[1]", "an item of a list"),
    ({"resources": {"cpu_milli": "8"}}, "resources.cpu_milli", "thousandths of a core"),
    ({"resources": {"memory_mib": -1}}, "resources.memory_mib", "whole number of MiB"),
    ({"resources": {"topology": "ring"}}, "resources.topology", '"nvlink"'),
    ({"resources": {"gpus ": 1}}, "resources.gpus ", "one of gpus, gpu_milli"),
    ({"lease": True}, "lease", "an object with ttl_seconds"),
    ({"lease": {"ttl_seconds": 0}}, "lease.ttl_seconds", "between 1 and 604800"),
    ({"lease": {"ttl_seconds": 604_801}}, "lease.ttl_seconds", "between 1 and 604800"),
    ({"lease": {"ttl_seconds": "60"}}, "lease.ttl_seconds", "a number of seconds"),
    ({"lease": {"wait_seconds": -1}}, "lease.wait_seconds", "between 0 and 604800"),
    ({"lease": {"priority": 0.5}}, "lease.priority", "a whole number"),
    ({"lease": {"preemptible": 1}}, "lease.preemptible", "true or false"),
    ({"lease": {"idempotency_key": "k" * 129}}, "lease.idempotency_key", "128 characters"),
    ({"lease": {"ttl": 60}}, "lease.ttl", "one of ttl_seconds"),
    (
        {"lease": {"anti_affinity": {"group": "g", "topology": "planet"}}},
        "lease.anti_affinity.topology",
        '"zone"',
    ),
    (
        {"resources": {"where": [{"key": "a", "operator": "In"}]}},
        "resources.where[0]",
        "`values` beside In",
    ),
    (
        {"resources": {"where": [{"key": "a", "operator": "Exists", "values": ["b"]}]}},
        "resources.where[0]",
        "no `values` beside Exists",
    ),
    (
        {"resources": {"where": [{"key": "a", "operator": "Gt", "values": ["1"]}]}},
        "resources.where[0].operator",
        '"NotIn"',
    ),
    (
        {"resources": {"gpus": 2}, "alternatives": [{"gpus": 1}, {"gpus": -1}]},
        "alternatives[1].gpus",
        "between 0 and 1024",
    ),
    ({"resources": {"gpus": 2}, "alternatives": [{"gpus": 1}] * 8}, "alternatives", "at most 7"),
    (
        {"lease": {"ttl_seconds": 2, "ttl_seconds_min": 3}},
        "lease",
        "`ttl_seconds_min` of at most `ttl_seconds`",
    ),
    ({"provision": {"backend": "local", "specs": {}}}, "provision.specs", "one of backend, spec"),
    (
        {"provision": {"backend": "local", "on_failure": "restart"}},
        "provision.on_failure",
        '"requeue"',
    ),
    (
        {"provision": {"backend": "local", "on_failure": "requeue", "attempts_max": 0}},
        "provision.attempts_max",
        "from 1 to 100",
    ),
    (
        {"provision": {"backend": "local", "on_failure": "requeue", "attempts_max": 101}},
        "provision.attempts_max",
        "from 1 to 100",
    ),
    ({"policy_rule_uri": 5}, "policy_rule_uri", "name:version-tag"),
    ({"policy_rule_uri": "u" * 513}, "policy_rule_uri", "512 characters"),
    ({"inputs": []}, "inputs", "an object"),
    ({"clusters": "c"}, "clusters", "a list of at most 10000 cluster ids"),
    ({"clusters": ["c", {}]}, "clusters[1]", "cluster ids"),
    ({"clusters": ["c", "c" * 257]}, "clusters[1]", "cluster ids (strings or whole numbers), each"),
    ({"clusters": ["c" * 257]}, "clusters[0]", "each of at most 256 characters"),
    ({"resources": {"models": ["m" * 257]}}, "resources.models[0]", "at most 256 characters"),
    ({"clusters": ["c", ""]}, "clusters[1]", "a name that is not blank"),
    ({"resources": {"models": [" "]}}, "resources.models[0]", "leave the blank out"),
    ({"clusters": list(range(10_001))}, "clusters", "at most 10000"),
    ({"policy_rule_uri": "p:1\x1b[2J-a"}, "policy_rule_uri", UNSHOWN),
    ({"clusters": ["c", "c\u202ed"]}, "clusters[1]", UNSHOWN),
    ({"resources": {"models": ["A100\n"]}}, "resources.models[0]", UNSHOWN),
    (
        {"resources": {"where": [{"key": "a", "operator": "In", "values": ["\u200b"]}]}},
        "resources.where[0].values[0]",
        UNSHOWN,
    ),
    ({"lease": {"project": "p\u2066x"}}, "lease.project", UNSHOWN),
    ({"lease": {"idempotency_key": "k\r"}}, "lease.idempotency_key", UNSHOWN),
    ({"lease": {"anti_affinity": {"group": "\ufeffg"}}}, "lease.anti_affinity.group", UNSHOWN),
    ({"provision": {"backend": "lo\0cal"}}, "provision.backend", UNSHOWN),
    ({"filter": []}, "filter", "an object"),
    ({"search": "x"}, "search", "an object"),
    ({"parameters": 1}, "parameters", "an object"),
    ({"settings": 1}, "settings", "an object"),
    ({"explain": "yes"}, "explain", "true or false"),
    ({"dry_run": 1}, "dry_run", "true or false"),
    ({"id": 1.5}, "id", "at most 128 characters"),
    ({"id": True}, "id", "at most 128 characters"),
    ({"id": "i" * 129}, "id", "at most 128 characters"),
    ({"id": 2**63}, "id", "64-bit"),
    ({"inputs": {"a": [0, {"b": 2**64}]}}, "inputs.a[1].b", "64 bits"),
    ({"settings": {"a": -(2**63) - 1}}, "settings.a", "64 bits"),
]


@pytest.mark.parametrize(("changes", "field", "expected"), WRONG)
def test_the_error_names_a_wrong_field_and_the_expected_type(
    changes: dict[str, Any], field: str, expected: str
) -> None:
    error = refusal_of(text(**{"id": 9, **changes}))
    assert error.code is Code.BAD_MESSAGE
    assert error.field == field
    assert expected in error.expected
    assert error.field in error.reason
    assert error.id == (None if "id" in changes else 9)


def test_alternatives_without_resources_are_refused() -> None:
    error = refusal_of(text(alternatives=[{"gpus": 1}]))
    assert (error.code, error.field) == (Code.BAD_MESSAGE, "")
    assert error.reason == "alternatives: expected `resources` as well, which are tried first"


def test_the_reason_of_a_missing_field_is_the_documented_sentence() -> None:
    error = refusal_of(text(lease={"ttl_seconds": 0}))
    assert error.reason == "lease.ttl_seconds: expected a number of seconds between 1 and 604800"


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63), "", "x" * 128, None])
def test_an_id_is_a_string_or_an_integer(number: Any) -> None:
    assert ask(text(id=number)).id == number


# Operations ----------------------------------------------------------------------------------


def test_operations_are_read() -> None:
    assert decode('{"op": "release", "id": 1, "lease": "l", "token": "t"}') == Release(
        id=1,
        lease="l",
        token="t",  # noqa: S106  # The letter of the message above.
    )
    leases = decode('{"op": "leases", "filters": {"tenant": "a"}, "state": "active", "next": "z"}')
    assert isinstance(leases, LeaseListing)
    assert (leases.equalities(), leases.cursor) == ({"tenant": "a", "state": "active"}, "z")
    fleet = decode('{"op": "fleet", "cluster": "c", "after": "n", "limit": 5}')
    assert isinstance(fleet, FleetListing)
    assert (fleet.equalities(), fleet.cursor, fleet.limit) == ({"cluster": "c"}, "n", 5)
    whatif = decode('{"op": "whatif", "request": {"policy_rule_uri": "p", "inputs": {}}}')
    assert isinstance(whatif, WhatIf)
    assert whatif.request.policy_rule_uri == "p"


def test_unknown_fields_of_a_what_if_are_refused():
    text = '{"op": "whatif", "id": 7, "request": {"policy_rule_uri": "p", "inputs": {}, "prio": 1}}'
    with pytest.raises(BadMessage) as refusal:
        ignored_fields(text, decode(text))
    assert (refusal.value.field, refusal.value.id) == ("request.prio", 7)
    assert refusal.value.reason.startswith("request.prio: unknown field; expected one of ")
    bare = '{"op": "whatif", "change": {"ended": ["l-1"]}}'
    assert ignored_fields(bare, decode(bare)) == []


def test_an_operation_refuses_unknown_fields() -> None:
    error = refusal_of('{"op": "renew", "id": 1, "lease": "l", "token": "t", "ttl": 5}')
    assert (error.code, error.field, error.id) == (Code.BAD_MESSAGE, "ttl", 1)
    error = refusal_of('{"op": "drain", "cluster": "c", "seconds": -1}')
    assert (error.code, error.field) == (Code.BAD_MESSAGE, "seconds")
    error = refusal_of('{"op": "cordon", "node": "n"}')
    assert (error.code, error.field) == (Code.MISSING_FIELDS, "cluster")


@pytest.mark.parametrize("op", ["status", "why"])
def test_a_message_names_either_a_request_or_a_lease(op: str) -> None:
    message = decode(json.dumps({"op": op, "request": "r"}))
    assert isinstance(message, OPERATIONS[op])
    assert decode(json.dumps({"op": "why", "lease": "l"})) == Why(lease="l")
    for both in ({}, {"lease": "l", "request": "r"}):
        error = refusal_of(json.dumps({"op": op, "id": 4, **both}))
        assert (error.code, error.id) == (Code.MISSING_FIELDS, 4)
        assert error.reason.endswith("lease or request, not both" if both else "lease or request")


@pytest.mark.parametrize("limit", [0, 1001, "5"])
def test_the_length_of_a_page_is_limited(limit: Any) -> None:
    error = refusal_of(json.dumps({"op": "queue", "limit": limit}))
    assert error.reason == "limit: expected a whole number between 1 and 1000"


# No valid message ----------------------------------------------------------------------------


@pytest.mark.parametrize("frame", ["[]", "5", "null", '"adhoc"', "true", "[[[]]]"])
def test_only_json_objects_are_messages(frame: str) -> None:
    error = refusal_of(frame)
    assert (error.code, error.expected) == (Code.BAD_MESSAGE, "a JSON object")


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("{", "truncated"),
        ('{"adhoc": tru}', "near byte 14"),
        ('{"adhoc": true,}', "near byte 15"),
        ("{} {}", "near byte 4"),
        (text()[:-1] + ', "x": NaN}', "NaN and Infinity are not JSON"),
        (text()[:-1] + ', "x": -Infinity}', "NaN and Infinity are not JSON"),
        ('{"adhoc": "\\ud800"}', "half of a surrogate pair"),
        ('{"adhoc": "\ud800"}', "not Unicode"),
        (b'{"adhoc": "\xff"}', "byte 11 is not UTF-8"),
        ("{'adhoc': true}", "near byte 1"),
    ],
)
def test_bad_json_is_refused_with_its_place(frame: str | bytes, says: str) -> None:
    error = refusal_of(frame)
    assert error.code is Code.BAD_JSON
    assert says in error.reason


@pytest.mark.parametrize(
    "frame",
    [
        text(inputs={"a": 0})[:-1].replace("0", "1e999") + "}",
        text(lease={"ttl_seconds": 0}).replace("0", "1e400"),
        text(inputs={"a": 0}).replace("0", "9" * 10_000),
    ],
)
def test_numbers_beyond_64_bits_are_refused_and_keep_the_id(frame: str) -> None:
    error = refusal_of(frame[:-1] + ', "id": "n"}')
    assert (error.code, error.id) == (Code.BAD_MESSAGE, "n")
    assert "64 bits" in error.expected


@pytest.mark.parametrize("nest", ["[", '{"a":', '[{"b":'])
@pytest.mark.parametrize("levels", [200, 5_000, 150_000])
def test_a_message_that_is_nested_too_deeply_is_refused(nest: str, levels: int) -> None:
    for frame in (nest * levels, text()[:-1] + ', "inputs": ' + nest * levels):
        error = refusal_of(frame)
        assert error.code is Code.BAD_MESSAGE
        assert "128" in error.expected


@pytest.mark.parametrize("at", ['"id": "n", "inputs": %s', '"inputs": %s, "id": "n"'])
@pytest.mark.parametrize(("levels", "known"), [(fields.DEPTH_MAX, "n"), (100_000, None)])
def test_a_message_that_is_too_deep_keeps_its_id(at: str, levels: int, known: str | None) -> None:
    """The decoder gives up at some levels, and reads nothing of the message then."""
    for opens, closes in (("[", "]"), ('{"a":[', "]}")):
        error = refusal_of("{%s}" % (at % (opens * levels + closes * levels)))
        assert (error.code, error.id) == (Code.BAD_MESSAGE, known)
        assert "nested too deep" in error.reason


def test_the_deepest_message_allowed_is_read() -> None:
    inner = fields.DEPTH_MAX - 2
    allowed = text(inputs={"a": 0}).replace("0", "[" * inner + "]" * inner)
    assert ask(allowed).inputs["a"]
    assert refusal_of(allowed.replace("[]", "[[]]")).code is Code.BAD_MESSAGE


def test_brackets_in_strings_do_not_count_as_depth() -> None:
    words = '[{"' * 1_000 + "\\"
    assert ask(text(inputs={"a": words})).inputs == {"a": words}
    assert len(ask(text(inputs={"a": [{}] * 1_000})).inputs["a"]) == 1_000


def test_errors_that_quote_a_very_long_word_are_short() -> None:
    huge = "x" * 2**20
    assert ask(text(inputs={"a": huge})).inputs == {"a": huge}
    for frame in (
        text(id=huge),
        text(policy_rule_uri=huge),
        text(resources={huge: 1}),
        text(inputs={huge: 2**70}),
        text(resources={"topology": huge}),
        json.dumps({"op": "release", huge: 1}),
        huge,
    ):
        assert len(refusal_of(frame).reason) < 500


def test_each_field_has_a_text_about_its_expected_value() -> None:
    for kind in (AllocationRequest, BlockRequest, *OPERATIONS.values()):
        expected = expectations(kind)
        assert [name for name in kind.__struct_fields__ if not expected.get(name)] == []


@pytest.mark.parametrize(
    ("frame", "name"),
    [
        ('{"adhoc": true, "policy_rule_uri": "p:1-x", "inputs": {}, "inputs": {"a": 1}}', "inputs"),
        ('{"adhoc":true,"policy_rule_uri":"p:1-x","inputs":{},"id":7,"id":7}', "id"),
        ('{"op": "release", "lease": "a", "token": "t",\n\t"lease" : "b"}', "lease"),
        ('{"op": "status", "lease": "a", "op": "status"}', "op"),
        ('{"op": "release", "lease": "a", "token": "t", "op": "status"}', "op"),
        ('{"op": "queue", "lease": "a", "op": "release"}', "op"),
        ('{"adhoc": true, "inputs": 7, "inputs": {}}', "inputs"),
        ('{"adhoc": true, "policy_rule_uri": "p:1-x", "inputs": {}, "x": 1, "\\u0078": 2}', "x"),
        (
            '{"adhoc":1,"policy_rule_uri":"p:1-x","inputs":{}, "\\u0022\\u0022": 1, "\\"\\"": 2}',
            '""',
        ),
    ],
)
def test_a_repeated_field_is_refused_by_name(frame, name):
    with pytest.raises(BadMessage) as refused:
        decode(frame)
    assert (refused.value.code, refused.value.field) == (Code.BAD_MESSAGE, name)
    assert "twice" in refused.value.reason


@pytest.mark.parametrize("value", ['{"a": 1, "a": 2}', '"\\"\\u0022"', "[[[]]]", '"\\"id\\": 7"'])
def test_contents_of_user_fields_are_not_checked(value):
    frame = '{"adhoc": true, "policy_rule_uri": "p:1-x", "id": 7, "a\\"b": 1, "inputs": {"x": %s}}'
    assert decode(frame % value).id == 7


def test_the_field_op_of_a_message_is_read_first() -> None:
    assert operation_of(b'{"op": "status"}') == "status"
    assert operation_of(b'{"op": "status", "adhoc": true}') == ""
    brackets = b"[]," * PARTS_MAX
    for name in (b"op", b"adhoc"):
        assert operation_of(b'{"%s": [%s[]], "op": "status"}' % (name, brackets)) == ""


def texts_that_may_hold_anything(schema: Any, path: str, defined: Any) -> Iterator[str]:
    """Yield the text fields of a schema that have neither a pattern nor a list of values."""
    if "$ref" in schema:
        schema = defined[schema["$ref"].rpartition("/")[2]]
    if schema.get("type") == "string" and not schema.keys() & {"pattern", "enum"}:
        yield path
    for name, inner in schema.get("properties", {}).items():
        yield from texts_that_may_hold_anything(inner, name, defined)
    for kind in ("anyOf", "prefixItems"):
        for inner in schema.get(kind, []):
            yield from texts_that_may_hold_anything(inner, path, defined)
    for kind in ("items", "additionalProperties"):
        if isinstance(inner := schema.get(kind), dict):
            yield from texts_that_may_hold_anything(inner, path, defined)


@pytest.mark.parametrize("kind", [AllocationRequest, BlockRequest, *OPERATIONS.values()])
def test_texts_that_other_users_see_accept_no_control_characters(kind: type) -> None:
    (schema,), defined = msgspec.json.schema_components([kind])
    free = set(texts_that_may_hold_anything(schema, "", defined))
    # These are echoed to the sender, compared, parsed, or passed to the workload.
    assert free <= {"id", "filters", "traceparent", "command", "environment", "path"}
    reason = {"op": "cordon", "cluster": "c", "reason": "a\u202eb"}
    error = refusal_of(json.dumps(reason))
    assert (error.field, UNSHOWN in error.expected) == ("reason", True)
