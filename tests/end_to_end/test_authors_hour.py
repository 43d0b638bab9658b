"""From an idea to a live policy, as its author goes: new, test, push, shadow, activate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served import policy, ran

from moorage_client.cli import skeleton

pytestmark = pytest.mark.heavy

BIN = Path(sys.executable).parent
TYPO = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
        print("asked", input_data["seed"] % 100)
        return self.pick(input_data["fleet"])

    def pick(self, fleet):
        return fleet.feasable()
"""


def moorage(server, *arguments, code=0, folder=None):
    done = server.moorage(*arguments, folder=folder, PATH=f"{BIN}:{os.environ['PATH']}")
    assert done.returncode == code, done.stderr
    return done


def test_a_new_policy_passes_its_tests_and_goes_live(server, tmp_path):
    made = moorage(server, "policy", "new", "mine", folder=tmp_path)
    assert "Try it: moorage policy test mine" in made.stdout
    assert "passed" in moorage(server, "policy", "test", "mine", folder=tmp_path).stdout
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "mine"]
    own = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTEST_ADDOPTS": ""}
    subprocess.run(tests, cwd=tmp_path, env=own, check=True, capture_output=True, timeout=120)
    pushed = moorage(server, "policy", "push", "mine", "--uri", "mine:1-stable", folder=tmp_path)
    assert pushed.stdout == "mine:1-stable\n"
    assert "not available" not in pushed.stderr  # The types are for the editor alone.
    moorage(server, "policy", "activate", "mine:1-stable")
    answer = moorage(server, "ask", "mine", "--gpus", "1")
    assert json.loads(answer.stdout)["gpus"] == ["0"]


def test_its_code_is_typed(tmp_path):
    code = skeleton._FUNCTION.replace("{name}", "mine")  # As `new` writes it.
    (tmp_path / "function.py").write_text(code)
    checked = ("mypy", "--strict", "--cache-dir", tmp_path, tmp_path / "function.py")
    done = ran(sys.executable, "-m", *checked)
    assert done.returncode == 0, done.stdout


def test_a_folder_that_exists_is_left_alone(server, tmp_path):
    (tmp_path / "mine").mkdir()
    said = moorage(server, "policy", "new", "mine", code=2, folder=tmp_path).stderr
    assert "mine exists" in said
    moorage(server, "policy", "new", "../mine", code=2, folder=tmp_path)


def test_an_error_shows_the_authors_own_lines_and_a_suggestion(server, tmp_path):
    (tmp_path / "typo.py").write_text(TYPO)
    tried = moorage(server, "policy", "test", "typo.py", code=6, folder=tmp_path)
    first, *calls = tried.stdout.splitlines()[:3]
    assert "no attribute 'feasable'. Did you mean: 'feasible'? (typo.py, line 11)" in first
    assert calls == [
        '  typo.py, line 8, in eval: return self.pick(input_data["fleet"])',
        "  typo.py, line 11, in pick: return fleet.feasable()",
    ]
    assert "request 0 (policy_error):\n  asked 97\nrequest 1 " in tried.stderr
    assert "more requests" in tried.stderr


def test_push_tests_first_unless_told_not_to(server, tmp_path):
    (tmp_path / "typo.py").write_text(TYPO)
    push = ("policy", "push", "typo.py", "--uri", "typo:1-x")
    assert "NOT SOUND" in moorage(server, *push, code=6, folder=tmp_path).stderr
    assert server.http.get("/policy/typo:1-x").status_code == 404
    assert moorage(server, *push, "--no-test", folder=tmp_path).stdout == "typo:1-x\n"
    activate = ("policy", "activate", "typo:1-x")
    assert "was not activated" in moorage(server, *activate, code=6).stderr
    said = json.loads(moorage(server, *activate, "--json", code=6).stdout)
    assert (said["success"], said["error"]["code"]) == (False, "bad_policy")
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


def test_examples_say_what_a_policy_is_for(server, tmp_path):
    """What ranks fails at requests; its own examples decide."""
    text = policy("return [each['id'] for each in input_data]", "ranks:1-x")["code"]
    (tmp_path / "ranks.py").write_text(text)
    examples = [{"input_data": [{"id": "a"}, {"id": "b"}], "output": ["a", "b"]}]
    (tmp_path / "examples.json").write_text(json.dumps(examples))
    push = ("policy", "push", "ranks.py", "--uri", "ranks:1-x")
    assert "NOT SOUND" in moorage(server, *push, code=6, folder=tmp_path).stderr
    moorage(server, *push, "--examples", "examples.json", folder=tmp_path)


def test_what_is_unsound_is_registered_by_force_alone(server, tmp_path):
    """What it proposes is never there: it raises nothing, and places nothing."""
    text = policy("return {'cluster_id': 'nowhere'}", "wrong:1-x")["code"]
    (tmp_path / "wrong.py").write_text(text)
    push = ("policy", "push", "wrong.py", "--uri", "wrong:1-x")
    assert "--force" in moorage(server, *push, code=6, folder=tmp_path).stderr
    assert server.http.get("/policy/wrong:1-x").status_code == 404
    assert moorage(server, *push, "--force", folder=tmp_path).stdout == "wrong:1-x\n"


@pytest.mark.parametrize("folder", [False, True])
def test_a_file_has_one_name_in_what_is_said_of_it(server, tmp_path, folder):
    path = tmp_path / ("mine/code/function.py" if folder else "mine.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("improt json\n")
    name = "mine" if folder else "mine.py"
    shown = str(path.relative_to(tmp_path))
    push = ("policy", "push", name, "--uri", "mine:7-x", "--no-test")
    assert (
        f"code: {shown}, line 1: SyntaxError"
        in moorage(server, *push, code=6, folder=tmp_path).stderr
    )
    tried = moorage(server, "policy", "test", name, code=6, folder=tmp_path)
    assert f"{shown}, line 1: SyntaxError" in tried.stdout
