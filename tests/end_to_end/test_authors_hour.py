"""An author takes a policy from idea to activation: new, test, push, shadow, activate."""

import json
import os
import sys

import pytest
from served import MOORAGE, policy, ran

from moorage_client.cli import skeleton

pytestmark = pytest.mark.heavy

PATH = f"{MOORAGE.parent}:{os.environ['PATH']}"
TYPO = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
        print("seed", input_data["seed"] % 100)
        return self.pick(input_data["fleet"])

    def pick(self, fleet):
        return fleet.feasable()
"""


def moorage(server, *arguments, code=0, folder=None):
    done = server.moorage(*arguments, folder=folder, PATH=PATH)
    assert done.returncode == code, done.stderr
    return done


def test_a_new_policy_passes_its_tests_and_goes_live(server, tmp_path):
    made = moorage(server, "policy", "new", "mine", folder=tmp_path)
    assert "Try it: moorage policy test mine" in made.stdout
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "mine")
    assert ran(*tests, PATH=PATH, PYTEST_ADDOPTS="").returncode == 0
    push = ("policy", "push", "mine", "--uri", "mine:1-stable", "--no-test")
    pushed = moorage(server, *push, folder=tmp_path)
    assert pushed.stdout == "mine:1-stable\n"
    assert "not available" not in pushed.stderr  # Only the author's editor needs the types.
    moorage(server, "policy", "activate", "mine:1-stable")
    answer = moorage(server, "ask", "mine", "--gpus", "1")
    assert json.loads(answer.stdout)["gpus"] == ["0"]


def test_the_code_of_a_new_policy_is_typed(tmp_path):
    file = tmp_path / "function.py"
    file.write_text(skeleton._FUNCTION.replace("{name}", "mine"))  # As `policy new` writes it.
    done = ran(sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, file)
    assert done.returncode == 0, done.stdout


def test_an_existing_folder_is_not_overwritten(server, tmp_path):
    (tmp_path / "mine").mkdir()
    said = moorage(server, "policy", "new", "mine", code=2, folder=tmp_path).stderr
    assert "mine exists" in said
    moorage(server, "policy", "new", "../mine", code=2, folder=tmp_path)


def test_an_error_of_a_policy_shows_the_authors_own_lines_and_a_suggestion(server, tmp_path):
    (tmp_path / "typo.py").write_text(TYPO)
    tried = moorage(server, "policy", "test", "typo.py", code=6, folder=tmp_path)
    first, *calls = tried.stdout.splitlines()[:3]
    assert "no attribute 'feasable'. Did you mean: 'feasible'? (typo.py, line 11)" in first
    assert calls == [
        '  typo.py, line 8, in eval: return self.pick(input_data["fleet"])',
        "  typo.py, line 11, in pick: return fleet.feasable()",
    ]
    assert "request 0 (policy_error):\n  seed 97\nrequest 1 " in tried.stderr
    assert "more requests" in tried.stderr


def test_push_tests_a_policy_first_unless_the_option_no_test_is_given(server, tmp_path):
    (tmp_path / "typo.py").write_text(TYPO)
    push = ("policy", "push", "typo.py", "--uri", "typo:1-x")
    assert "NOT SOUND" in moorage(server, *push, code=6, folder=tmp_path).stderr
    assert server.http.get("/policy/typo:1-x").status_code == 404
    assert moorage(server, *push, "--no-test", folder=tmp_path).stdout == "typo:1-x\n"
    activate = ("policy", "activate", "typo:1-x")
    refused = moorage(server, *activate, "--json", code=6)
    assert json.loads(refused.stdout)["error"]["code"] == "bad_policy"
    assert "was not activated" in refused.stderr + refused.stdout
    assert moorage(server, *activate, "--force").stdout == "typo:stable -> typo:1-x\n"
    moorage(server, *push[:-1], "typo:2-x", "--force", folder=tmp_path)
    canary = ("policy", "canary", "typo", "typo:2-x")
    assert "was not started" in moorage(server, *canary, code=6).stderr
    assert "canary typo:2-x" in moorage(server, *canary, "--force").stdout
    refused = server.ask("typo:1-x", resources={"gpus": 1})["error"]
    assert refused["traceback"] == [
        'typo.py, line 8, in eval: return self.pick(input_data["fleet"])',
        "typo.py, line 11, in pick: return fleet.feasable()",
    ]


def test_examples_describe_the_use_of_a_policy(server, tmp_path):
    """A ranking policy fails on allocation requests, so only its own examples count."""
    text = policy("return [each['id'] for each in input_data]", "ranks:1-x")["code"]
    (tmp_path / "ranks.py").write_text(text)
    examples = [{"input_data": [{"id": "a"}, {"id": "b"}], "output": ["a", "b"]}]
    (tmp_path / "examples.json").write_text(json.dumps(examples))
    push = ("policy", "push", "ranks.py", "--uri", "ranks:1-x")
    assert "NOT SOUND" in moorage(server, *push, code=6, folder=tmp_path).stderr
    moorage(server, *push, "--examples", "examples.json", folder=tmp_path)


@pytest.mark.parametrize("shown", ["mine/code/function.py", "mine.py"])
def test_a_policys_file_has_one_name_in_all_messages(server, tmp_path, shown):
    path, name = tmp_path / shown, shown.partition("/")[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("improt json\n")
    push = ("policy", "push", name, "--uri", "mine:7-x", "--no-test")
    expected = f"{shown}, line 1: SyntaxError"
    assert f"code: {expected}" in moorage(server, *push, code=6, folder=tmp_path).stderr
    tried = moorage(server, "policy", "test", name, code=6, folder=tmp_path)
    assert expected in tried.stdout
