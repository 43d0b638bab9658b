"""Tests of the HTTP server's ports, clean ends, and requests in progress at a stop."""

import asyncio
import logging
import signal

import httpx
import pytest

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.web.identity import LOOK_SECONDS
from moorage.web.server import WebServer
from moorage.web.services import StandbyReads, StandbyServices


async def test_port_zero_takes_a_free_port_and_a_taken_port_is_an_error(site):
    assert site.port > 0
    await WebServer(site.house).close()  # Before a start, `close` does nothing.
    with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{site.port}"):
        await WebServer(site.house).start("127.0.0.1", site.port)


async def test_the_http_server_leaves_the_signal_handlers_of_the_daemon(site):
    server = WebServer(site.house)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert signal.SIG_DFL in before
    await server.start("127.0.0.1", 0)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    await server.close()


async def unreadable(token):
    return False


async def test_close_of_the_http_server_lets_requests_finish_and_can_be_repeated(site, caplog):
    with caplog.at_level(logging.WARNING):
        waiting = asyncio.create_task(site.client.post("/allocate", content=b"hold"))
        await asyncio.wait_for(site.house.holds.wait(), 60)
        closing = asyncio.create_task(site.server.close())
        site.house.let_go.set()
        answer = await waiting
        await asyncio.wait_for(closing, 60)
        await site.server.close()
    assert answer.status_code == 200
    with pytest.raises(httpx.ConnectError):
        await site.client.get("/healthz")
    assert "Traceback" not in caplog.text


async def test_a_waiting_request_ends_with_its_callers_token(site, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING):
        waiting = asyncio.create_task(site.client.post("/allocate", content=b"hold"))
        await asyncio.wait_for(site.house.holds.wait(), 60)
        monkeypatch.setattr(site.house, "pending", unreadable)
        monkeypatch.setattr(site.house, "authenticate", lambda bearer: None)
        await asyncio.sleep(3 * LOOK_SECONDS)  # Looks that learn nothing must not end the request.
        assert not waiting.done()
        monkeypatch.setattr(site.house, "pending", lambda token: None)
        answer = await asyncio.wait_for(waiting, 20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert not site.house.let_go.is_set()
    assert "Traceback" not in caplog.text


async def test_requests_that_outlast_the_drain_are_refused(site, caplog):
    server = WebServer(site.house, drain_seconds=1)
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}/allocate"
    with caplog.at_level(logging.WARNING):
        waiting = asyncio.create_task(site.client.post(url, content=b"hold"))
        await asyncio.wait_for(site.house.holds.wait(), 60)
        await asyncio.wait_for(server.close(), 20)
        answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert "Traceback" not in caplog.text


async def test_a_standby_names_the_leader_and_later_leads(site):
    house, leader = site.house, {"leader": "ws://a:1", "leader_http": "http://a:2"}
    standby = StandbyServices(
        authenticate=house.authenticate,
        pending=house.pending,
        why_refused=house.why_refused,
        readiness=lambda: (False, {"role": "standby", **leader}),
        refusal=lambda: ServiceError(Code.NOT_LEADER, "ask that one", details=leader),
        metrics_text=house.metrics_text,
        audit=house.audit,
    )
    server = WebServer(standby)
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        for method, path in (("GET", "/policy"), ("POST", "/allocate"), ("GET", "/openapi.json")):
            answer = await client.request(method, path)
            error = {"code": "not_leader", "reason": "ask that one", **leader}
            assert (answer.status_code, answer.json()["error"]) == (421, error)
        assert (await client.get("/clusters/a")).json()["details"]["leader"] == "ws://a:1"
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["details"]["role"]) == (503, "standby")
        assert (await client.get("/metrics")).text == "moorage_up 1\n"
        server.change(house)
        assert (await client.get("/policy")).status_code == 200
    await server.close()


async def test_a_standby_answers_with_the_age_of_its_data(site):
    refusal = ServiceError(Code.NOT_LEADER, "ask that one", details={"leader": "ws://a:1"})
    doubts = []
    site.house.standby = StandbyReads(
        refusal=lambda: refusal,
        doubt=lambda: doubts[0] if doubts else None,
        headers=lambda: [(b"moorage-revision", b"7")],
    )
    server = WebServer(site.house)
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        for method, path, status in (
            ("GET", "/policy", 200),
            ("GET", "/clusters/none", 404),
            ("HEAD", "/history", 200),
            ("POST", "/clusters/query", 200),
            ("POST", "/websocket-ticket", 200),
            ("POST", "/clusters", 421),
            ("POST", "/allocate", 421),
            ("POST", "/api/filter", 421),
            ("DELETE", "/policy/p", 421),
            ("GET", "/policy/p/logs", 421),
            ("GET", "/api/tasks/1", 421),
        ):
            answer = await client.request(method, path, json=None if method != "POST" else {})
            assert answer.status_code == status, (method, path, answer.text)
            assert answer.headers["moorage-revision"] == "7"
        doubts.append(refusal)
        assert (await client.get("/policy")).status_code == 421
        assert (await client.get("/metrics")).status_code == 200
    await server.close()


async def test_a_server_that_no_longer_leads_answers_503(site):
    server = WebServer(site.house, trusts=lambda: False)
    port = await server.start("127.0.0.1", 0)
    answer = await site.client.get(f"http://127.0.0.1:{port}/policy")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    await server.close()
