"""Bad input gets one clear reply that names the field; the daemon lives and nothing is lost."""

import pytest
from served import FIRST_FIT, ask_message

GOOD = ask_message(resources={"gpus": 1})

ONCE = GOOD | {"lease": {}, "provision": {"backend": "local", "spec": {}, "attempts_max": 2}}

# What is sent, the code of the reply, and the field it names.
BAD = [
    ("", "bad_json", None),
    ("{", "bad_json", None),
    ("[]", "bad_message", None),
    ('"text"', "bad_message", None),
    ("null", "bad_message", None),
    ("{}", "missing_fields", None),
    ({"adhoc": True}, "missing_fields", None),
    ({"adhoc": True, "policy_rule_uri": FIRST_FIT}, "missing_fields", None),
    ({**GOOD, "resources": {"gpus": -1}}, "bad_message", "resources.gpus"),
    ({**GOOD, "provision": {"backend": "memory"}}, "bad_message", "lease"),
    (ONCE, "bad_message", "provision.attempts_max"),
    ({**GOOD, "filter": {"matchType": "cluster"}}, "bad_message", "filter.filter"),
    ({**GOOD, "search": {"matchType": "cluster"}}, "bad_message", "search.rankingPolicyRule"),
    ({"op": "nonsense"}, "unknown_op", "op"),
    ({"op": "release"}, "missing_fields", None),
    ({"op": "release", "lease": "x", "token": "y"}, "unknown_lease", "lease"),
    ({"op": "renew", "lease": "x", "token": "y"}, "unknown_lease", "lease"),
    ({"op": "why", "lease": "x"}, "unknown_request", "request"),
    ({"op": "status", "request": "x"}, "unknown_lease", "lease"),
    ({"op": "cancel", "request": "x"}, "unknown_request", "request"),
    ({"op": "fleet", "cluster": "x"}, "unknown_clusters", "cluster"),
    ({"op": "watch", "topics": ["x"]}, "bad_message", "topics[0]"),
    ({"input": {}, "mode": "allocate"}, "bad_message", "mode"),
    ({"input": []}, "bad_message", "input"),
    ({"input": {"policies": []}, "mode": 7}, "bad_message", "mode"),
    ({"input": {"policies": "none"}}, "bad_message", "input.policies"),
    ('{"adhoc": true, "policy_rule_uri": "x", "inputs": {"n": NaN}}', "bad_json", None),
    ('{"adhoc": true, "policy_rule_uri": "x", "inputs": {"s": "\\ud800"}}', None, None),
    ("[" * 100_000, None, None),
]


@pytest.mark.parametrize(("message", "code", "field"), BAD, ids=lambda value: str(value)[:60])
def test_one_reply_that_names_the_field(server, message, code, field):
    bad, good = server.say(message, GOOD)
    assert bad["success"] is False
    assert bad["message"]
    assert good["success"] is True
    if code is not None:
        assert bad["error"]["code"] == code
    if field is not None:
        assert bad["error"]["field"] == field
