"""The policy `similarity` measures like the search without a policy, and places requests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import new_policy, node

from moorage.model import Cluster, Demand
from moorage.policy import Fleet, FleetView
from moorage.query import nearest
from moorage_policies.similarity import WEIGHTS, distances, values_at

REGISTERED = {
    "big": {"gpus": {"count": 64}, "tags": ["train", "eu"]},
    "mid": {"gpus": {"count": 16}, "tags": ["eu"]},
    "small": {"gpus": {"count": 4}, "tags": ["eu"]},
    "tiny": {"gpus": {"count": 1}, "tags": ["us"]},
}
DOCUMENTS = [{"id": name, **document} for name, document in REGISTERED.items()]


def rank(documents=DOCUMENTS, policy=None, **parameters):
    found = (policy or new_policy("similarity")).eval(parameters, documents, {})
    return [document["id"] for document in found]


def test_the_most_similar_documents_come_first_and_the_reference_is_left_out():
    assert rank(like="mid", weights={"gpus.count": 1}) == ["small", "tiny", "big"]
    assert rank(like={"gpus": {"count": 60}}, weights={"gpus.count": 1})[0] == "big"
    assert rank(like={"tags": ["us"]})[0] == "tiny"


def test_the_ranking_returns_documents_unchanged():
    found = new_policy("similarity").eval({"like": "mid"}, DOCUMENTS, {})
    assert all(document in DOCUMENTS for document in found)


def test_without_a_reference_all_documents_stay_in_their_order():
    assert rank(list(reversed(DOCUMENTS))) == ["big", "mid", "small", "tiny"]


class Registry:
    """A stand-in for the injected cluster client, with the calls that the policy needs."""

    def read_cluster(self, name):
        known = name in REGISTERED
        return (known, REGISTERED[name]) if known else (False, "HTTP error occurred: none")


def with_registry():
    policy = new_policy("similarity")
    policy._settings = {"cluster_client": Registry()}
    return policy


def test_a_reference_that_is_not_a_candidate_is_read_from_the_registry():
    others = [document for document in DOCUMENTS if document["id"] != "big"]
    found = rank(others, with_registry(), like="big", weights={"gpus.count": 1})
    assert found == ["mid", "small", "tiny"]
    with pytest.raises(LookupError, match=r"parameters\.like.*'nowhere'.*none"):
        rank(others, with_registry(), like="nowhere")


# Placement -------------------------------------------------------------------------------------


FLEET = Fleet()
FLEET.install([Cluster(name, (node("n", gpus=2), node("m"))) for name in REGISTERED])
FLEET.set_capacity(FLEET.row("small", "n"), 0, 0, [0, 0, 0, 0])


def place(demand, candidates=None, policy=None, documents=DOCUMENTS, **parameters):
    data = {
        "fleet": FleetView(FLEET, demand, candidates),
        "cluster_data": {
            document["id"]: {"data": document}
            for document in documents
            if candidates is None or document["id"] in candidates
        },
        "inputs": {},
    }
    policy = policy or new_policy("similarity")
    value = policy.eval({"weights": {"gpus.count": 1}} | parameters, data, {})
    return value.get("cluster_id"), value.get("node_id")


def test_the_most_similar_cluster_with_room_is_chosen():
    assert place(Demand(1), like="mid") == ("mid", "m")
    assert place(Demand(1), like={"gpus": {"count": 3}}) == ("small", "m")
    assert place(Demand(8), like="mid") == (None, None)
    assert place(Demand(1)) == ("big", "m")


def test_a_reference_need_not_be_a_candidate():
    policy = with_registry()
    assert place(Demand(1), ["big", "tiny"], policy, like="small") == ("tiny", "m")


def test_documents_are_read_again_after_the_refresh_interval_or_for_another_request():
    policy = new_policy("similarity")
    assert place(Demand(1), policy=policy, like="mid", refresh_seconds=3600) == ("mid", "m")
    assert place(Demand(1), policy=policy, like="tiny", refresh_seconds=3600) == ("tiny", "m")
    assert place(Demand(1), ["big"], policy, like={"tags": []}, refresh_seconds=3600)[0] == "big"
    changed = [{"id": "big", "gpus": {"count": 1}}, *DOCUMENTS[1:]]
    like = {"gpus": {"count": 2}}
    assert place(Demand(1), policy=policy, like=like)[0] == "tiny"
    assert place(Demand(1), policy=policy, documents=changed, like=like, refresh_seconds=3600)[
        0
    ] == ("tiny")
    assert (
        place(Demand(1), policy=policy, documents=changed, like=like, refresh_seconds=0)[0] == "big"
    )


# The measure -----------------------------------------------------------------------------------

LEAVES = st.one_of(st.none(), st.integers(0, 9), st.floats(0, 9), st.booleans())
TEXTS = st.lists(st.sampled_from("abc"), max_size=3)
ANY = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.fixed_dictionaries({}, optional={"count": LEAVES, "memory": LEAVES}),
        "nodes": st.fixed_dictionaries(
            {},
            optional={
                "nodeData": st.lists(
                    st.fixed_dictionaries(
                        {}, optional={"gpus": st.fixed_dictionaries({"modelNames": TEXTS})}
                    ),
                    max_size=2,
                )
            },
        ),
        "reputation": LEAVES,
        "tags": TEXTS,
        "regionId": st.sampled_from(["eu", "us"]),
    },
)


@settings(max_examples=200)
@given(documents=st.lists(ANY, min_size=1, max_size=6), like=ANY)
def test_the_policy_and_the_search_compute_equal_distances(documents, like):
    known = {f"d{number}": each for number, each in enumerate(documents)}
    expected = dict(nearest(known, like))
    found = distances(list(known.values()), like, WEIGHTS)
    assert found.tolist() == pytest.approx([expected[name] for name in known])


def test_a_list_on_a_path_is_compared_by_its_members():
    document = {"nodes": [{"gpus": ["a", "b"]}, {"gpus": []}, {"gpus": ["c"]}, 5, None]}
    assert list(values_at(document, ["nodes", "gpus"])) == ["a", "b", "c"]
