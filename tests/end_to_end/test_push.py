"""`moorage policy push`: every form that a policy may have, and errors that show the place."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from served import policy

pytestmark = pytest.mark.heavy  # Many daemons.

POLICY = policy("return {'cluster_id': 'lab', 'gpus': ['0']}", "x")["code"]
EXAMPLES = [{"request": {"resources": {"gpus": 1}}, "output": {"cluster_id": "lab"}}]
FAILING = [{"request": {}, "output": {"cluster_id": "elsewhere"}}]


@pytest.fixture
def push(server, tmp_path):
    """The command, run in a folder of its own."""

    def run(*arguments, command="push"):
        return server.moorage("policy", command, *arguments, folder=tmp_path)

    return run


def forms(folder: Path) -> None:
    """Write one policy in every form, with an example in those that can hold one."""
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
    with zipfile.ZipFile(folder / "rule.zip", "w") as packed:
        for name, text in files.items():
            packed.writestr(f"code/{name}", text)
    for kind in ("gz", "xz"):
        with tarfile.open(folder / f"rule.tar.{kind}", f"w:{kind}") as packed:
            for name, text in files.items():
                info = tarfile.TarInfo(f"code/{name}")
                info.size = len(text.encode())
                packed.addfile(info, io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("form", "uri"),
    [
        ("rule.py", "pushed:7-py"),
        ("whole", None),
        ("rule.json", None),
        ("rule.zip", "pushed:7-zip"),
        ("rule.tar.gz", "pushed:7-gz"),
        ("rule.tar.xz", "pushed:7-xz"),
    ],
)
def test_every_form_is_registered(push, server, tmp_path, form, uri):
    forms(tmp_path)
    examples = ["--examples=examples.json"] if form in {"rule.py", "rule.json"} else []
    done = push(form, *(["--uri", uri] if uri else []), *examples)
    assert done.returncode == 0, done.stderr
    registered = done.stdout.strip()
    assert registered == uri or registered.startswith("pushed:7-")
    document = server.http.get(f"/policy/{registered}").json()["data"]
    assert (document["name"], document["version"]) == ("pushed", "7")
    if form == "whole":
        assert document["tags"] == "a,b"
    assert server.ask(registered, resources={"gpus": 1}, clusters=["east"])["error"]["code"] == (
        "policy_unsound"
    ), "the policy itself was registered: it names a cluster that is not here"


def test_options_go_before_the_document(push, server, tmp_path):
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


def test_a_syntax_error_is_shown_with_its_caret(push, tmp_path):
    (tmp_path / "bad.py").write_text(POLICY + "    x = (1,\n")
    done = push("bad.py", "--uri=bad:1-x")
    assert done.returncode == 6
    *_, line, caret = done.stderr.rstrip("\n").splitlines()
    assert line.index("(") == caret.index("^")
    assert "bad.py, line 6: SyntaxError: '(' was never closed" in done.stderr


def test_all_that_is_wrong_is_shown(push, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "function.py").write_text("x = (\n")
    (tmp_path / "code" / "helper.py").write_text("def f(:\n")
    done = push(str(tmp_path), "--uri=bad:1-x")
    assert "function.py, line 1" in done.stderr
    assert "helper.py, line 1" in done.stderr
    assert done.stderr.count("^") == 2


def test_a_failing_example_is_shown(push, tmp_path):
    (tmp_path / "rule.py").write_text(POLICY)
    (tmp_path / "examples.json").write_text(json.dumps(FAILING))
    done = push("rule.py", "--uri=bad:1-x", "--examples=examples.json")
    assert done.returncode == 6
    assert 'expected output.cluster_id to be "elsewhere"; it is "lab"' in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("list.json", "[]", "is no PolicyRule document"),
        ("empty.json", "{}", "has no `code`"),
        ("broken.json", "{", "is not JSON"),
        ("gone.json", None, "cannot read"),
    ],
)
def test_a_document_that_is_none_is_refused_here(push, tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    done = push(name, "--uri=bad:1-x")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
