"""Any value that a policy returns is read as a proposal or refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.model import Demand
from moorage.policy import ProposalError, ProposedShare, parse_proposal
from moorage.policy.proposal import AMOUNT_MAX, GPUS_MAX, SHARES_MAX

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([2**53, 2**63, -(2**64), 10**400])
)
KEYS = [
    "cluster_id",
    "clusterId",
    "node_id",
    "nodeId",
    "gpus",
    "gpu_milli",
    "cpu_milli",
    "memory_mib",
]
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=12,
)
shares = st.fixed_dictionaries({"cluster_id": leaves}, optional=dict.fromkeys(KEYS[2:], anything))


@given(anything | shares | st.lists(shares, max_size=3), st.sampled_from([None, Demand(gpus=2)]))
def test_any_value_of_a_policy_is_read_as_a_proposal_or_refused(
    value: Any, demand: Demand | None
) -> None:
    try:
        proposals = parse_proposal(value, demand)
    except ProposalError:
        proposals = ()  # Any other exception fails this test.
    for ask_message in proposals:
        assert isinstance(ask_message.cluster_id, str)
        assert ask_message.cluster_id
        assert ask_message.node_id is None or (
            isinstance(ask_message.node_id, str) and ask_message.node_id
        )
        assert ask_message.gpus is None or len(set(ask_message.gpus)) == len(ask_message.gpus)
        assert 1 <= ask_message.gpu_milli <= 1000
        for amount in (ask_message.cpu_milli, ask_message.memory_mib):
            assert type(amount) is int
            assert 0 <= amount <= AMOUNT_MAX
        assert (ask_message.share() is None) == (
            ask_message.node_id is None or ask_message.gpus is None
        )


@pytest.mark.parametrize(
    "value", [None, 3, "harbour", [], {}, {"cluster_id": None}, [1, "a"], {"a": {"cluster_id": 1}}]
)
def test_a_value_that_names_no_cluster_is_no_proposal(value: Any) -> None:
    assert parse_proposal(value, None) == ()


def test_the_demand_completes_missing_fields_of_the_proposal() -> None:
    demand = Demand(gpus=1, gpu_milli=500, cpu_milli=7, memory_mib=8)
    said = {"clusterId": 3, "nodeId": "n", "gpus": [0, "1"], "cpu_milli": 9.0}
    assert parse_proposal(said, demand) == (ProposedShare("3", "n", ("0", "1"), 500, 9, 8),)  # type: ignore[arg-type]  # Plain values in tests.
    assert parse_proposal({"cluster_id": "c"}, None) == (
        ProposedShare("c", None, None, 1000, 0, 0),
    )  # type: ignore[arg-type]  # Plain values in tests.


@pytest.mark.parametrize("key", ["cluster_id", "node_id", "gpus", "cpu_milli", "gpu_milli"])
def test_a_number_with_too_many_digits_is_refused(key: str) -> None:
    huge = 10**5000
    with pytest.raises(ProposalError) as caught:
        parse_proposal({"cluster_id": "c", key: [huge] if key == "gpus" else huge}, None)
    assert caught.value.field.startswith(key)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"cluster_id": ""}, "cluster_id"),
        ({"cluster_id": True}, "cluster_id"),
        ({"cluster_id": "c", "node_id": 1.5}, "node_id"),
        ({"cluster_id": "c", "gpus": "01"}, "gpus"),
        ({"cluster_id": "c", "gpus": [0, "0"]}, "gpus"),
        ({"cluster_id": "c", "gpus": [None]}, "gpus[0]"),
        ({"cluster_id": "c", "gpus": list(range(GPUS_MAX + 1))}, "gpus"),
        ({"cluster_id": "c", "gpu_milli": 0}, "gpu_milli"),
        ({"cluster_id": "c", "gpu_milli": 1001}, "gpu_milli"),
        ({"cluster_id": "c", "cpu_milli": 0.5}, "cpu_milli"),
        ({"cluster_id": "c", "cpu_milli": float("nan")}, "cpu_milli"),
        ({"cluster_id": "c", "memory_mib": float("inf")}, "memory_mib"),
        ({"cluster_id": "c", "memory_mib": AMOUNT_MAX + 1}, "memory_mib"),
        ({"cluster_id": "c", "memory_mib": "8"}, "memory_mib"),
        ([{"cluster_id": "c"}, {"cluster_id": "c", "gpus": 1}], "[1].gpus"),
        ([{"cluster_id": "c"}] * (SHARES_MAX + 1), "(list)"),
    ],
)
def test_a_malformed_proposal_names_its_field(value: Any, field: str) -> None:
    with pytest.raises(ProposalError) as caught:
        parse_proposal(value, None)
    assert caught.value.field == field


@pytest.mark.parametrize("empty", [None, {}, {"error": "no GPU"}, "none"])
def test_parts_of_several_requests_are_separate_and_parts_of_a_gang_belong_together(
    empty: Any,
) -> None:
    value = [{"cluster_id": "c", "node_id": "n"}, empty]
    for demand in (None, Demand(gpus=1)):
        (share,) = parse_proposal(value, demand)
        assert (share.cluster_id, share.node_id) == ("c", "n")
    with pytest.raises(ProposalError) as caught:
        parse_proposal(value, Demand(gpus=1, nodes=2))
    assert caught.value.field == "[1].cluster_id"


def test_gpus_of_one_node_in_several_parts_of_a_gang_are_joined_to_one_share() -> None:
    def part(*gpus: str, **more: Any) -> dict[str, Any]:
        return {"cluster_id": "c", "node_id": "n", "gpus": gpus, "cpu_milli": 5, **more}

    parts = [part("0"), part("1", "2"), {**part("0"), "node_id": "m"}]
    assert [(each.gpus, each.cpu_milli) for each in parse_proposal(parts, None)] == [
        (("0", "1", "2"), 10),
        (("0",), 5),
    ]
    for apart in ([part("0"), part("0")], [part("0"), part("1", gpu_milli=500)]):
        assert len(parse_proposal(apart, None)) == 2  # Two shares of one node are refused later.
    assert len(parse_proposal(parts, Demand(gpus=1, nodes=3))) == 3
