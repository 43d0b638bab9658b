"""Tests of the output of `moorage fleet CLUSTER` for each node."""

from moorage.records.replies import NodeCapacity
from moorage_client.answers import read_as
from moorage_client.cli.looking import _node_cells, node_state


def test_each_node_is_shown_with_its_state() -> None:
    for unavailable, state in (
        ("", "ready"),
        ("cordoned by ann: fans", "cordoned"),
        ("drained by ann", "drained"),
        *((reason, reason) for reason in ("cordoned", "not ready", "tainted example.com/broken")),
    ):
        assert node_state(read_as(NodeCapacity, {"unavailable": unavailable})) == state
    assert node_state(read_as(NodeCapacity, {"duplicate_of": "east/n1"})) == "duplicate"


def test_only_gpus_with_room_are_listed_as_free() -> None:
    gpus = {"0": 0, "1": 250, "2": 1000}
    ((*_, free, _, _),) = _node_cells([{"node_id": "n", "models": [], "gpus": gpus}])
    assert free == "1:250 2"
