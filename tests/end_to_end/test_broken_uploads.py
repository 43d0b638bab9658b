"""A hundred broken policies of a hundred kinds: the answers say what is wrong, and others go on.

The kinds are in `broken_uploads`; the daemon, its jail and its sockets are real. While they are
uploaded, another client asks for placements and gets them.
"""

import json
import threading

import pytest
from broken_uploads import BROKEN, HTTP, URI, WARNED
from served import ask_message

pytestmark = pytest.mark.heavy

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
        found = {text: upload(server, broken) for text, broken in BROKEN.items()}
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
    for text, document in WARNED.items():
        status, reply = upload(server, document)
        assert status == 200, (text, reply)
        assert any(text in each for each in reply["warnings"]), (text, reply)
        assert server.http.delete(f"/policy/{URI}").status_code == 200


@pytest.mark.parametrize("text", BROKEN)
def test_the_answer_says_what_is_wrong_and_what_is_expected(answers, text):
    status, reply = answers[text]
    assert status in {400, 413, 429, 503}, reply  # Never 500: that is a defect of the server.
    assert reply["success"] is False
    assert reply["message"] == reply["error"]["reason"]
    assert text in reply["message"]
    assert reply["error"].get("expected") or reply["error"].get("missing")


def test_no_two_answers_are_the_same(answers):
    assert len({reply["message"] for _, reply in answers.values()}) == len(answers)


def test_none_is_registered(server, answers):
    assert answers
    assert server.http.get(f"/policy/{URI}").status_code == 404
