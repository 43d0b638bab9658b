"""Uploads of broken policies get errors that name the fault, and other clients are served.

The daemon, its jail and its sockets are real. During the uploads, another client requests
placements and gets them.
"""

import base64
import gzip
import io
import json
import lzma
import tarfile
import threading
import zipfile
from typing import Any

import pytest
from served import ask_message

pytestmark = pytest.mark.heavy

HTTP = "http://the-daemon"
URI = "broken:1-x"
HEAD = "class AIOSv1PolicyRule:\n"
INIT = "    def __init__(self, rule_id, settings, parameters): pass\n"
EVAL = "    def eval(self, parameters, input_data, context): return input_data['inputs']\n"
GOOD = HEAD + INIT + EVAL

Broken = dict[str, Any]
"""Maps a part of the expected error to the upload: a document, bytes, or a function."""


def document(**more: Any) -> dict[str, Any]:
    """Return a valid document with the given fields replaced; None omits a field."""
    whole = {"policy_rule_uri": URI, "code": GOOD, **more}
    return {key: value for key, value in whole.items() if value is not None}


def code_document(content: bytes | str) -> dict[str, Any]:
    """Return a document whose `code` is source text, or an archive in base64."""
    text = content if isinstance(content, str) else base64.b64encode(content).decode()
    return document(code=text)


def zip_of(**members: str) -> bytes:
    """Return a zip of files whose names have `_` where a dot is."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, content in members.items():
            packed.writestr(f"code/{name.replace('_', '.')}", content)
    return stream.getvalue()


def tar_of(*names: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(GOOD)
            packed.addfile(info, io.BytesIO(GOOD.encode()))
    return stream.getvalue()


def damaged_zip() -> bytes:
    packed = bytearray(zip_of(function_py=GOOD))
    packed[packed.index(GOOD.encode()[:20]) + 3] ^= 0xFF  # Now the checksum is wrong.
    return bytes(packed)


def files(**named: str) -> dict[str, Any]:
    """Return a document with an archive of these files beside a good function.py."""
    return code_document(zip_of(**{"function_py": GOOD, **named}))


def method(line: str) -> str:
    """Return a policy in which one method replaces the good one of the same name."""
    name = line.split("(", maxsplit=1)[0].rsplit(maxsplit=1)[-1]
    rest = "".join(each for each in (INIT, EVAL) if f"def {name}(" not in each)
    return HEAD + rest + f"    {line}\n"


def with_examples(*examples: Any, **more: Any) -> dict[str, Any]:
    return document(metadata={"examples": list(examples)}, **more)


ONE = {"request": {"inputs": {"cluster_id": "lab"}}}
BROKEN: Broken = {
    # Documents.
    "JSON": b"{",
    "body: expected a JSON object": b"[]",
    "the body is not JSON: ": b'{"code": "\xff"}',
    "Missing required fields: name, version, release_tag (or": document(policy_rule_uri=None),
    "release_tag: expected x, as in policy_rule_uri": document(release_tag="y"),
    "name: expected a text": document(name=7),
    "version: expected a text": document(version=1),
    "release_tag: expected a text": document(release_tag=[]),
    "metadata: expected an object": document(metadata=[]),
    "tags: expected a text with commas, or a list": document(tags=7),
    "code_type: expected a text": document(code_type=7),
    "policy_settings: expected an object": document(policy_settings=[]),
    "functionality_data: expected an object": document(functionality_data=[]),
    "resource_estimates: expected an obj": document(resource_estimates=7),
    "whole numbers of at most 64 bits": document(policy_parameters={"size": 10**30}),
    "at most 16777216": document(metadata={"pad": "x" * (17 << 20)}),
    # Sources of the code.
    "127.0.0.1 is not public": document(code=f"{HTTP}/openapi.json"),
    "169.254.169.254 is not public": document(code="http://169.254.169.254/latest"),
    "has no host: ": document(code="http://xn--a.example./x"),
    "neither UTF-8 text nor a known": document(code="data:;base64,gIGC"),
    "more than 8388608 bytes": document(code="#" * (9 << 20) + "\n"),
    # Archives.
    r"has a member 'code\\function.py'": code_document(tar_of("code\\function.py")),
    r"has a member 'code/a\nb.py'": code_document(tar_of("code/a\nb.py")),
    "paths of at most 255 characters": code_document(tar_of("code/" + "a" * 300)),
    "has a member '.'": code_document(tar_of(".", "code/function.py")),
    "function.py' is a file and a folder": code_document(
        zip_of(**{"function_py": GOOD, "function_py/x_py": ""})
    ),
    "Bad CRC-32 for file 'code/function.py'": code_document(damaged_zip()),
    "the .tar.gz is damaged: invalid header": code_document(gzip.compress(b"hello" * 400)),
    "Memory usage limit exceeded": lambda: code_document(
        lzma.compress(GOOD.encode(), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
    ),
    # Code.
    "line 4: SyntaxError: '(' was never closed\nx = (1,\n    ^": code_document(GOOD + "x = (1,\n"),
    "unterminated string literal": code_document(GOOD + "x = 'a\n"),
    "IndentationError": code_document(GOOD + "  x = 1\n"),
    "TabError": code_document("if 1:\n        a = 1\n\tb = 2\n"),
    "unknown encoding: klingon": code_document("# coding: klingon\n" + GOOD),
    "too many nested parentheses": code_document("x = " + "(" * 5000 + "\n"),
    "code: helper.py, line 1: SyntaxError": files(helper_py="def f(:\n"),
    "a library is called 'json' too; rename": files(json_py="x = 1\n"),
    "cannot import name 'nothing'": code_document("from json import nothing\n" + GOOD),
    "function.py: there is no class AIOSv1PolicyRule": code_document("x = 1\n"),
    "it has a function of that name": code_document("def AIOSv1PolicyRule(): pass\n"),
    "line 2: KeyError: '__init__'": code_document(
        "class Hidden(type):\n    def __getattribute__(self, name): raise KeyError(name)\n"
        "class AIOSv1PolicyRule(metaclass=Hidden): pass\n"
    ),
    "MemoryError": code_document("x = " + "-" * 100_000 + "1\n"),
    "AIOSv1PolicyRule has no eval(self, parameters, input_data, con": code_document(HEAD + INIT),
    "AIOSv1PolicyRule has no __init__(self, rule_id, settings": code_document(HEAD + EVAL),
    "line 3: eval cannot be called as eval(": code_document(
        method("def eval(self, parameters): pass")
    ),
    "__init__ cannot be called as": code_document(method("def __init__(self, a, b, c, d): pass")),
    "eval must return its answer: write it": code_document(
        method("async def eval(self, a, b, c): pass")
    ),
    "line 1: ZeroDivisionError: division by zero": code_document("1 / 0\n" + GOOD),
    "PermissionError": code_document("open('/etc/passwd')\n" + GOOD),
    "did not load within": code_document("while True: pass\n" + GOOD),
    "exited with status 7": code_document("import os; os._exit(7)\n" + GOOD),
    "line 1: MemoryError": code_document("x = 'x' * (1 << 40)\n" + GOOD),
    "SystemExit: enough": code_document("raise SystemExit('enough')\n" + GOOD),
    "AssertionError: not today": code_document("assert False, 'not today'\n" + GOOD),
    # Examples.
    'to be "lob"; it is "lab"': with_examples({**ONE, "output": {"cluster_id": "lob"}}),
    "“nowhere” is none": with_examples({"request": {"inputs": {"cluster_id": "nowhere"}}}),
    "output.node_id: expected a text; it is missing": with_examples(
        ONE, policy_output_schema={"node_id": {"type": "string", "required": True}}
    ),
    "list indices must be integers or slices, not str": with_examples({"input_data": []}),
}

WARNED: Broken = {
    "line 2: 'requests>=2' is not available": files(requirements_txt="numpy\nrequests>=2\n"),
    "x.git' is not available": files(requirements_txt="git+https://example.org/x.git"),
    "line 1: '-r more.txt' is not available": files(requirements_txt="-r more.txt"),
    "requirements.txt has more than 1000 lines": files(requirements_txt="numpy\n" * 1001),
    "line 1: 'requests' is not available to": code_document("import requests\n" + GOOD),
    "management cannot be called": code_document(GOOD + "    def management(self, action): pass\n"),
    "management must return its answer": code_document(
        GOOD + "    def management(self, a, b): yield\n"
    ),
    "(KeyError: 'gone')": code_document(method("def __init__(self, a, b, c): self.x = b['gone']")),
    # Schemas.
    "policy_input_schema: expected an object with one entry": document(policy_input_schema="x"),
}
"""Faults for which a policy is registered with a warning instead of refused."""

ANSWER_SECONDS_MAX = 30
"""Longest wait of the other client for an answer; a daemon that hangs fails the test."""
PAUSE_SECONDS = 0.005


def upload(server, broken):
    """Upload a broken policy; return the status and the failure."""
    if callable(broken):
        broken = broken()
    if isinstance(broken, bytes):
        answer = server.http.post("/policy", content=broken)
    else:
        code = broken.get("code")
        if isinstance(code, str):
            broken = {**broken, "code": code.replace(HTTP, server.running.http)}
        answer = server.http.post("/policy", json=broken)
    return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def answers(server):
    """Upload each broken policy once, while another client sends requests."""
    over, placed = threading.Event(), []

    def ask():
        with server.socket() as socket:
            while not over.wait(PAUSE_SECONDS):
                socket.send(json.dumps(ask_message(resources={"gpus": 1})))
                placed.append(json.loads(socket.recv(ANSWER_SECONDS_MAX))["success"])

    bystander = threading.Thread(target=ask)
    bystander.start()
    try:
        found = {text: upload(server, broken) for text, broken in BROKEN.items()}
        assert bystander.is_alive(), "the other client got no answer in time"
    finally:
        over.set()
        bystander.join()
    assert all(placed)
    assert len(placed) >= len(BROKEN)
    return found


def test_unknown_fields_of_existing_documents_yield_a_warning(server):
    for text, document in WARNED.items():
        status, reply = upload(server, document)
        assert status == 200, (text, reply)
        assert any(text in each for each in reply["warnings"]), (text, reply)
        assert server.http.delete(f"/policy/{URI}").status_code == 200


@pytest.mark.parametrize("text", BROKEN)
def test_the_error_names_the_fault_and_the_expected_value(answers, text):
    status, reply = answers[text]
    assert status in {400, 413, 429, 503}, reply  # Status 500 would be a defect of the server.
    assert reply["success"] is False
    assert reply["message"] == reply["error"]["reason"]
    assert text in reply["message"]
    assert reply["error"].get("expected") or reply["error"].get("missing")


def test_each_broken_upload_gets_a_different_answer(answers):
    assert len({reply["message"] for _, reply in answers.values()}) == len(answers)


def test_no_broken_upload_is_registered(server, answers):
    assert answers
    assert server.http.get(f"/policy/{URI}").status_code == 404
