"""Tests of `moorage policy push`: the accepted forms of a policy, and the errors."""

import json
import tarfile
from pathlib import Path

import pytest
from served import policy

pytestmark = pytest.mark.heavy  # Many daemons.

POLICY = policy("return {'cluster_id': 'lab', 'gpus': ['0']}", "x")["code"]
EXAMPLES = [{"request": {"resources": {"gpus": 1}}, "output": {"cluster_id": "lab"}}]
FAILING = [{"request": {}, "output": {"cluster_id": "elsewhere"}}]


@pytest.fixture
def push(server, tmp_path):
    """The command `policy push`, run in a separate folder."""

    def run(*arguments, command="push"):
        return server.moorage("policy", command, *arguments, folder=tmp_path)

    return run


def forms(folder: Path) -> None:
    """Write a policy in several forms, with an example in each form that can hold an example."""
    files = {"function.py": POLICY, "examples.json": json.dumps(EXAMPLES)}
    (folder / "rule.py").write_text(POLICY)
    (folder / "examples.json").write_text(json.dumps(EXAMPLES))
    (folder / "whole" / "code").mkdir(parents=True)
    for name, text in files.items():
        (folder / "whole" / "code" / name).write_text(text)
    identity = {"name": "pushed", "version": "7", "release_tag": "whole", "tags": "a,b"}
    (folder / "whole" / "policy.json").write_text(json.dumps(identity))
    document = {"policy_rule_uri": "pushed:7-json", "code": POLICY, "metadata": {"owner": "ann"}}
    (folder / "rule.json").write_text(json.dumps(document))
    with tarfile.open(folder / "rule.tar.xz", "w:xz") as packed:
        packed.add(folder / "whole" / "code", "code")


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("rule.py", ["--uri=pushed:7-py", "--examples=examples.json"]),
        ("whole", []),
        ("rule.tar.xz", ["--uri=pushed:7-xz"]),
    ],
)
def test_push_registers_a_policy_in_each_form(push, server, tmp_path, form, more):
    """`tests/clients/test_services.py` and `tests/catalog/documents` test other archives."""
    forms(tmp_path)
    done = push(form, *more)
    assert done.returncode == 0, done.stderr
    registered = done.stdout.strip()
    document = server.http.get(f"/policy/{registered}").json()["data"]
    assert (document["name"], document["version"]) == ("pushed", "7")
    if form == "whole":
        assert document["tags"] == "a,b"
    assert server.ask(registered, resources={"gpus": 1}, clusters=["east"])["error"]["code"] == (
        "policy_unsound"
    ), "the policy was registered: it proposes a cluster that does not exist here"


def test_options_of_push_override_the_document_of_the_policy(push, server, tmp_path):
    forms(tmp_path)
    done = push(
        "rule.json", "--tag=other", "--description=mine", "--examples=examples.json",
        '--parameters={"p": 1}',
    )  # fmt: skip
    assert done.stdout.strip() == "pushed:7-other"
    document = server.http.get("/policy/pushed:7-other").json()["data"]
    assert (document["description"], document["policy_parameters"]) == ("mine", {"p": 1})
    assert document["metadata"] == {"owner": "ann", "examples": EXAMPLES}
    changes = push("pushed:7-other", "--history", command="show").stdout
    assert "registered" in changes
    assert "local" in changes


def test_push_shows_a_failing_example(push, tmp_path):
    (tmp_path / "rule.py").write_text(POLICY)
    (tmp_path / "examples.json").write_text(json.dumps(FAILING))
    done = push("rule.py", "--uri=bad:1-x", "--examples=examples.json")
    assert done.returncode == 6
    assert 'expected output.cluster_id to be "elsewhere"; it is "lab"' in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("list.json", "[]", "is not a PolicyRule document"),
        ("empty.json", "{}", "has no `code`"),
        ("broken.json", "{", "is not JSON"),
        ("gone.json", None, "cannot read"),
    ],
)
def test_push_refuses_an_invalid_document(push, tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    done = push(name, "--uri=bad:1-x")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
