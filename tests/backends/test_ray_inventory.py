"""The cluster document that is made from the observed nodes of a Ray cluster."""

from typing import Any

from moorage.backends.ray import inventory


def observation(*, answers: bool) -> dict[str, Any]:
    node = {
        "id": "n1",
        "name": "",
        "address": "127.0.0.1",
        "resources": {"GPU": 2.0, "CPU": 4.0, "memory": 1 << 30},
        "labels": {},
        "free": {"GPU": 2.0, "CPU": 4.0, "memory": 1 << 30},
        "answers": answers,
        "workers": [],
        "leased": [],
    }
    return {"nodes": [node], "ours": []}


def test_a_silent_node_is_listed_and_gets_no_new_leases() -> None:
    lost, fine = (
        inventory.document("ray", observation(answers=answers))["nodes"]["nodeData"][0]
        for answers in (False, True)
    )
    assert lost == fine | {"unavailable": "its raylet does not answer"}
