"""A daemon checks requests, answers, blocks, rankings and commands by a policy's schemas."""

import pytest
from served import policy

COUNT = {"type": "number", "min": 1, "max": 4, "description": "GPUs"}
SIZE = {**COUNT, "default": 2}
ZONE = {"type": "string", "pattern": "^z[0-9]$", "required": True}
ECHO = """
return {"cluster_id": "east", "inputs": input_data["inputs"], "parameters": parameters,
        "zone": self.settings["zone"]}
"""
ZONE_1 = {"zone": "z1"}
SAYS = "return input_data['inputs']['says']"


@pytest.fixture(scope="module", autouse=True)
def _publish(server):
    server.publish(
        policy(
            ECHO,
            "schemas.echo:1-t",
            policy_input_schema={"jobs": {"type": "array", "items": COUNT}, "size": SIZE},
            policy_parameters_schema={"size": SIZE, "zone": ZONE},
            policy_settings_schema={"zone": ZONE},
            policy_settings={"zone": "z0"},
        ),
        policy(
            SAYS,
            "schemas.says:1-t",
            policy_output_schema={
                "cluster_id": {"type": "string", "required": True},
                "gpus": {"type": "array", "max_length": 2},
            },
        ),
    )


def ranking(uri: str, count: int = 1) -> dict:
    rule = {"policyRuleURI": uri, "parameters": {"return": count}}
    return {"matchType": "cluster", "rankingPolicyRule": rule}


def test_defaults_of_a_schema_apply_and_the_caller_overrides_them(server):
    reply = server.ask("schemas.echo:1-t", parameters={"zone": "z1"})
    assert reply["data"]["inputs"] == {"size": 2}
    assert reply["data"]["parameters"] == {"zone": "z1", "size": 2}
    assert reply["data"]["zone"] == "z0"
    more = {"parameters": {"zone": "z1", "size": 4}, "settings": {"zone": "z9"}}
    data = server.ask("schemas.echo:1-t", inputs={"size": 1}, **more)["data"]
    assert (data["inputs"]["size"], data["parameters"]["size"], data["zone"]) == (1, 4, "z9")


@pytest.mark.parametrize(
    ("more", "field", "expected"),
    [
        ({}, "parameters.zone", "a text that matches ^z[0-9]$"),
        ({"parameters": ZONE_1, "settings": {"zone": 1}}, "settings.zone", "a text that matches"),
        ({"parameters": ZONE_1, "inputs": {"jobs": [1, 0]}}, "inputs.jobs[1]", "a number from 1"),
    ],
)
def test_the_refusal_of_inputs_that_break_the_schema_names_the_field(server, more, field, expected):
    error = server.ask("schemas.echo:1-t", **more)["error"]
    assert (error["code"], error["field"]) == ("bad_message", field)
    assert error["expected"].startswith(expected)
    message = {"policy_rule_uri": "schemas.echo:1-t", "inputs": {}, **more}
    answer = server.http.post("/allocate", json=message)
    assert answer.json()["error"]["field"] == field


@pytest.mark.parametrize(
    ("says", "field"),
    [
        ({"declined": "no room"}, None),
        ([{"cluster_id": "east"}], None),
        ({"gpus": []}, "output.cluster_id"),
        ({"cluster_id": "east", "gpus": ["0", "1", "2"]}, "output.gpus"),
    ],
)
def test_the_answer_of_a_policy_is_checked_by_the_output_schema(server, says, field):
    reply = server.ask("schemas.says:1-t", inputs={"says": says})
    assert reply["success"] is (field is None), reply
    if field is not None:
        assert (reply["error"]["code"], reply["error"]["field"]) == ("policy_bad_output", field)


def test_a_refused_proposal_is_removed_from_the_cells_view(server):
    server.publish(
        policy(
            'free = input_data["cluster_data"]["east"]["capacity"]["east-0"]["gpus"]\n'
            'place = {"cluster_id": "east", "node_id": "east-0"}\n'
            'return {**place, "gpus": input_data["inputs"]["gpus"], "free": sum(free.values())}',
            "schemas.take:1-t",
            policy_output_schema={"gpus": {"type": "array", "max_length": 1}},
        )
    )
    lease = {"lease": {"ttl_seconds": 60}}
    three = {"inputs": {"gpus": ["0", "1", "2"]}, "resources": {"gpus": 3}}
    for _ in range(3):
        assert server.ask("schemas.take:1-t", **three, **lease)["error"]["field"] == "output.gpus"
    seen = server.ask("schemas.take:1-t", inputs={"gpus": ["0"]}, resources={"gpus": 1})
    assert seen["data"]["free"] == 4000


def test_answers_of_blocks_and_rankings_are_checked(server):
    error = server.ask(search=ranking("schemas.echo:1-t"))["error"]
    assert error["code"] == "bad_message"
    assert "parameters.zone" in error["reason"]
    server.publish(
        policy(
            "return {'selection_score_data': {'score': parameters['score']}}",
            "schemas.score:1-t",
            policy_parameters_schema={"score": {"type": "number", "default": 1}},
            policy_output_schema={"selection_score_data": {"type": "object", "required": True}},
        )
    )
    reference = {"policyRuleURI": "schemas.score:1-t"}
    block = {"input": {"policies": {"resourceAllocator": reference}}, "id": 1}
    assert server.say(block)[0]["success"]
    reference["parameters"] = {"score": "high"}
    error = server.say(block)[0]["error"]
    assert error["code"] == "bad_message"
    assert "parameters.score: expected a number" in error["reason"]


def test_a_block_is_checked_by_the_input_schema(server):
    needs = {"type": "object", "required": True, "properties": {"gpus": {**COUNT, "default": 2}}}
    block_schema = {"type": "object", "properties": {"needs": needs}}
    region = {"type": "object", "properties": {"regionId": {"type": "string"}}}
    score = "input_data['block']['needs']['gpus'] / 8"
    server.publish(
        policy(
            f"return {{'selection_score_data': {{'score': {score}, 'node_info': {{}}}}}}",
            "schemas.needs:1-t",
            policy_input_schema={"block": block_schema, "cluster": region},
        ),
        policy(
            "if input_data['action'] == 'selection':\n"
            "    return {'clusters': input_data['filter_result']}\n"
            "return input_data['clusters'][0]",
            "schemas.chooses:1-t",
            policy_input_schema={
                "filter_result": {"type": "array", "items": region},
                "block_data": block_schema,
            },
        ),
    )
    policies = {
        "resourceAllocator": {"policyRuleURI": "schemas.needs:1-t"},
        "clusterAllocator": {"policyRuleURI": "schemas.chooses:1-t"},
    }
    block = {"policies": policies, "needs": {}}
    reply = server.say({"input": block, "id": 1})[0]
    assert reply["success"], reply
    assert reply["data"]["score_data"]["score"] == 0.25, "the schema's default"
    del policies["clusterAllocator"]
    for needs_given, field in (({"gpus": 9}, ".gpus"), (None, "")):
        error = server.say({"input": {**block, "needs": needs_given}, "id": 1})[0]["error"]
        assert error["code"] == "bad_message"
        left_out = error["left_out"][0]
        assert f"input_data.block.needs{field}: expected" in left_out["reason"]
    policies["clusterAllocator"] = {"policyRuleURI": "schemas.chooses:1-t"}
    error = server.say({"input": {**block, "needs": {"gpus": 9}}, "id": 1})[0]["error"]
    assert (error["code"], error["field"]) == ("bad_message", "input_data.block_data.needs.gpus")
    assert error["expected"].startswith("a number from 1 to 4")


def test_ranked_documents_are_checked_by_the_input_schema(server):
    server.publish(
        policy(
            "return sorted(input_data, key=lambda each: (each['rank'], each['id']))",
            "schemas.ranks:1-t",
            policy_input_schema={"rank": {"type": "number", "max": 4, "default": 3}},
        ),
        policy(
            "return input_data",
            "schemas.picky:1-t",
            policy_input_schema={"id": {"type": "number"}},
            policy_parameters_schema={"return": {"type": "number", "max": 1}},
        ),
    )
    body = ranking("schemas.ranks:1-t")
    found = server.http.post("/api/no-ir/similarity-search", json=body).json()
    assert found, "the default is filled in"
    error = server.ask(search=ranking("schemas.picky:1-t"))["error"]
    assert (error["code"], error["field"]) == ("bad_message", "input_data[0].id")
    assert error["expected"].startswith("a number")
    assert "the schema of schemas.picky:1-t" in error["reason"]
    error = server.ask(search=ranking("schemas.picky:1-t", 2))["error"]
    assert error["field"] == "search.rankingPolicyRule.parameters.return"
