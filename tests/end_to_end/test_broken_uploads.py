"""A hundred broken policies of a hundred kinds: each is told what is wrong, and no other suffers.

The kinds are in `broken_uploads`; the daemon, its jail and its sockets are real. While they are
uploaded, another client asks for placements and gets them.
"""

import json
import threading

import pytest
from broken_uploads import BROKEN, HTTP, URI, WARNED
from served import ask_message

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

KINDS_MIN = 100
ANSWER_SECONDS_MAX = 30
"""How long the bystander waits for one answer: a daemon that stands still does not pass."""
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
    """Upload every kind once, while another client asks."""
    over, placed = threading.Event(), []

    def ask():
        with server.socket() as socket:
            while not over.wait(PAUSE_SECONDS):
                socket.send(json.dumps(ask_message(resources={"gpus": 1})))
                placed.append(json.loads(socket.recv(ANSWER_SECONDS_MAX))["success"])

    bystander = threading.Thread(target=ask)
    bystander.start()
    try:
        found = {kind: upload(server, broken) for kind, (broken, _) in BROKEN.items()}
        assert bystander.is_alive(), "the bystander was not answered in time"
    finally:
        over.set()
        bystander.join()
    assert all(placed)
    assert len(placed) >= len(BROKEN)
    return found


def test_there_are_a_hundred_kinds():
    assert len(BROKEN) + len(WARNED) >= KINDS_MIN


def test_what_existing_documents_have_is_registered_with_a_warning(server):
    for kind, (document, text) in WARNED.items():
        status, said = upload(server, document)
        assert status == 200, (kind, said)
        assert any(text in each for each in said["warnings"]), (kind, said)
        assert server.http.delete(f"/policy/{URI}").status_code == 200


@pytest.mark.parametrize("kind", BROKEN)
def test_each_is_told_what_is_wrong(answers, kind):
    status, said = answers[kind]
    _, text = BROKEN[kind]
    assert status in {400, 413, 429, 503}, said  # Never 500: that is a defect of the server.
    assert said["success"] is False
    assert said["message"] == said["error"]["reason"]
    assert text in said["message"]


def test_no_two_are_told_the_same(answers):
    kinds = {}
    for kind, (_, said) in answers.items():
        kinds.setdefault(said["message"], []).append(kind)
    assert [each for each in kinds.values() if len(each) > 1] == []


def test_each_is_told_what_is_expected(answers):
    mute = [
        kind
        for kind, (_, said) in answers.items()
        if not (said["error"].get("expected") or said["error"].get("missing"))
    ]
    assert mute == []


def test_none_is_registered(server, answers):
    assert answers
    assert server.http.get(f"/policy/{URI}").status_code == 404
