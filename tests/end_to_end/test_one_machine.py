"""A machine is registered under several names, and its GPU goes to one workload at a time."""

import platform

from served import Server, cluster, policy, serving

PICKS = """
inputs = input_data["inputs"]
return {"cluster_id": inputs["cluster"], "node_id": inputs["node"], "gpus": ["0"]}
"""


def here(name: str, node: str) -> dict:
    document = cluster(name, nodes=1, gpus=1)
    document["nodes"]["nodeData"][0]["id"] = node
    return document


def start(server: Server, name: str, node: str) -> dict:
    reply = server.ask(
        "picks:1-x",
        inputs={"cluster": name, "node": node},
        resources={"gpus": 1},
        lease={"ttl_seconds": 600},
        provision={"backend": "local", "spec": {"command": ["sleep", "1000"]}},
    )
    assert reply["success"], reply
    return reply["lease"]


def test_a_gpu_of_a_machine_with_three_node_names_gets_one_workload_at_a_time():
    with serving() as server:
        server.publish(policy(PICKS, "picks:1-x"))
        places = [("a", platform.node()), ("b", platform.node()), ("c", "localhost")]
        server.register(*(here(*place) for place in places))
        first = start(server, *places[0])
        server.in_state(first, "active")
        for place in places[1:]:
            refused = server.in_state(start(server, *place), "ended")
            assert "the same machine is registered twice" in refused["reason"]
            assert f"a/{platform.node()}" in refused["reason"]
        assert server.status(first)["state"] == "active"
        server.release(first)
        server.in_state(first, "ended")
        second = start(server, *places[2])
        server.in_state(second, "active")
        server.release(second)
