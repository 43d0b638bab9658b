# ruff: noqa: S105  # The tokens of a harbour that lives for one test.
import asyncio
import json

import pytest

from moorage.model import Code, Demand, LeaseTerms
from moorage_client import (
    Client,
    ConnectionFailed,
    LeaseEnded,
    MoorageError,
    NeverFits,
    NoCapacity,
    NotFound,
    ProtocolViolated,
    RequestRefused,
    RuleFailed,
    Timeout,
    Unauthorized,
)
from moorage_client.connection import IN_FLIGHT_MAX


async def test_an_answer_without_a_lease_has_the_value_of_the_policy_and_warnings(harbour, client):
    answer = await client.ask("first:1-x", inputs={"say": [1, "two"]}, clusters=["c0"])
    assert answer.data == [1, "two"]
    assert answer.lease is None
    assert answer.warnings == ("three clusters",)
    assert answer.request == "r-0"
    [sent] = harbour.heard
    assert sent["adhoc"] is True
    assert sent["clusters"] == ["c0"]
    assert not {"lease", "resources", "explain", "dry_run", "filter"} & sent.keys()


async def test_a_lease_comes_with_its_token_which_no_repr_shows(harbour, client):
    terms = LeaseTerms(ttl_seconds=60, wait_seconds=1)
    answer = await client.ask("first:1-x", resources=Demand(gpus=2), lease=terms)
    lease = answer.lease
    assert lease is not None
    assert lease.token == "t-1"
    assert "t-1" not in repr(answer)
    assert lease.placement[0].gpus == ("0", "1")
    assert (await client.renew(lease.id, "t-1", 120)).expires_at > lease.expires_at
    for _ in range(2):
        assert (await client.release(lease.id, "t-1")).state == "ended"
    for error, call in (
        (LeaseEnded, client.renew(lease.id, "t-1")),
        (Unauthorized, client.release(lease.id, "t-2")),
        (NotFound, client.renew("l-9", "t-1")),
    ):
        with pytest.raises(error):
            await call
    assert harbour.heard[0]["resources"]["gpus"] == 2


@pytest.mark.parametrize(
    ("policy", "kind", "code", "about"),
    [
        ("full:1-x", NoCapacity, Code.NO_CAPACITY, ("", "", {"nodes": {"busy": 3}})),
        ("huge:1-x", NeverFits, Code.NEVER_FITS, ("", "", {})),
        ("broken:1-x", RuleFailed, Code.POLICY_ERROR, ("", "", {})),
        ("unknown:1-x", NotFound, Code.UNKNOWN_POLICY, ("", "", {"similar": ["first:1-x"]})),
        ("badly:1-x", RequestRefused, Code.BAD_MESSAGE, ("resources.gpus", "a number", {})),
    ],
)
async def test_each_kind_of_refusal_has_its_own_error_class(client, policy, kind, code, about):
    with pytest.raises(kind) as caught:
        await client.ask(policy)
    error = caught.value
    assert (error.code, error.request) == (code, "r-no")
    assert (error.field, error.expected, error.details) == about


async def test_many_requests_share_one_socket_and_overtake_each_other(harbour, client):
    slow = asyncio.create_task(client.ask("slow:1-x"))
    answers = await asyncio.gather(
        *(client.ask("first:1-x", inputs={"say": number}) for number in range(200))
    )
    assert [answer.data for answer in answers] == list(range(200))
    assert not slow.done()
    harbour.gate.set()
    assert (await slow).data["cluster_id"] == "c0"
    assert len(harbour.headers) == 1


async def test_the_evaluation_deadline_is_added_to_the_reply_timeout(harbour, client):
    slow = asyncio.create_task(client.ask("slow:1-x", deadline_seconds=3600, timeout=0.0))
    await client.ask("first:1-x")
    harbour.gate.set()
    assert (await slow).data["cluster_id"] == "c0"


async def test_lists_are_read_page_by_page(harbour, client):
    for _ in range(5):
        await client.ask("first:1-x", lease={"ttl_seconds": 60})
    assert [lease.id async for lease in client.leases()] == [f"l-{n}" for n in range(1, 6)]
    assert harbour.count("leases") == 3
    await client.release("l-2", "t-2")
    [ended] = await client.leases(state="ended").all()
    assert ended.id == "l-2"
    assert ended.token == ""


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "ws://", None])
async def test_a_wrong_url_or_a_missing_server_is_an_error_at_once(nowhere, url):
    with pytest.raises(ConnectionFailed, match="ws://" if url else "refused") as caught:
        await Client(url or nowhere).__aenter__()
    assert caught.value.url == (url or nowhere)


async def test_the_client_sends_its_token_and_raises_if_the_token_is_wrong(harbour):
    harbour.token = "secret"
    async with Client(harbour.url, "secret") as client:
        await client.ask("first:1-x")
    assert harbour.headers == ["Bearer secret"]
    with pytest.raises(Unauthorized, match="Send a valid token"):
        async with Client(harbour.url, "wrong"):
            pass


@pytest.mark.parametrize(
    "garbage",
    ["not json", "[1]", '{"hello": 1}', b"\x00\x01", '{"success": true, "id": "77"}'],
)
async def test_an_unreadable_reply_is_an_error_without_a_retry(harbour, client, garbage):
    harbour.garbage = garbage
    with pytest.raises(ProtocolViolated):
        await client.ask("first:1-x")
    assert len(harbour.heard) == 1


async def test_an_invalid_lease_is_an_invalid_reply(harbour, client):
    await client.ask("first:1-x", lease={"ttl_seconds": 60})
    harbour.leases["l-1"]["placement"] = "everywhere"
    with pytest.raises(ProtocolViolated, match="placement"):
        await client.leases().all()


async def test_a_refusal_without_an_id_answers_all_open_requests(harbour, client):
    refusal = {"code": "busy", "reason": "Too many sessions."}
    harbour.garbage = json.dumps({"success": False, "message": "…", "error": refusal})
    asks = [client.ask("first:1-x") for _ in range(3)]
    answers = await asyncio.gather(*asks, return_exceptions=True)
    assert {answer.code for answer in answers} == {"busy"}


async def test_after_the_timeout_of_a_request_the_client_releases_a_lease_that_is_granted_late(
    harbour, client
):
    with pytest.raises(Timeout, match=r"0\.2 s"):
        await client.ask("slow:1-x", lease={"ttl_seconds": 60}, timeout=0.2)
    with pytest.raises(TimeoutError):
        await client.ask("slow:1-x", timeout=0.05)
    harbour.gate.set()
    await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("release") == 1)
    assert (await client.ask("first:1-x")).data  # The late replies confuse no other call.
    assert harbour.leases["l-1"]["state"] == "ended"


async def test_after_a_cancelled_request_the_client_releases_a_lease_that_is_granted_late(
    harbour, client
):
    ask = asyncio.create_task(client.ask("slow:1-x", lease={"ttl_seconds": 60}))
    await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("ask") == 1)
    ask.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ask
    harbour.gate.set()
    await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("release") == 1)


async def test_a_caller_that_chose_the_idempotency_key_keeps_a_lease_that_is_granted_late(
    harbour, client
):
    terms = {"ttl_seconds": 60, "idempotency_key": "mine"}
    with pytest.raises(Timeout):
        await client.ask("slow:1-x", lease=terms, timeout=0.05)
    harbour.gate.set()
    answer = await client.ask("slow:1-x", lease=terms)
    assert answer.lease is not None
    assert list(harbour.leases) == [answer.lease.id]
    assert harbour.count("release") == 0


async def test_an_ask_repeated_after_a_lost_answer_returns_the_same_lease(harbour, client):
    harbour.drop_after_grant = True
    answer = await client.ask("first:1-x", lease={"ttl_seconds": 60})
    assert answer.lease is not None
    assert list(harbour.leases) == [answer.lease.id]
    first, second = (message["lease"]["idempotency_key"] for message in harbour.heard)
    assert first == second != ""


async def test_the_client_reaches_a_restarted_server_again(harbour, client):
    lease = (await client.ask("first:1-x", lease={"ttl_seconds": 60})).lease
    await asyncio.to_thread(harbour.stop)
    renewing = asyncio.create_task(client.renew(lease.id, lease.token))
    await asyncio.sleep(0)
    await asyncio.to_thread(harbour.start)
    assert (await renewing).id == lease.id


async def test_requests_that_may_not_be_repeated_are_sent_only_once(harbour, client):
    harbour.mute.add("manage")
    doing = asyncio.create_task(client.manage("first:1-x", "poke"))
    await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("manage") == 1)
    harbour.lose_sockets()
    with pytest.raises(ConnectionFailed):
        await doing
    harbour.mute.clear()
    assert await client.manage("first:1-x", "poke") == {"did": "poke"}
    assert harbour.count("manage") == 2


async def test_the_client_refuses_more_requests_than_may_wait(harbour, client):
    harbour.mute.add("why")
    waiting = [asyncio.create_task(client.why("r")) for _ in range(IN_FLIGHT_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused) as caught:
        await client.why("r")
    assert caught.value.code == Code.BUSY
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_closed_client_refuses_calls_and_says_that_it_is_closed(client):
    await client.close()
    with pytest.raises(MoorageError, match="closed"):
        await client.ask("first:1-x")


async def test_wrong_arguments_raise_a_type_error_or_value_error(client):
    with pytest.raises(TypeError):
        await client.ask("first:1-x", inputs={"x": object()})
    with pytest.raises(ValueError, match="JSON"):
        await client.ask("first:1-x", inputs={"x": float("nan")})
    with pytest.raises(TypeError, match="gpu"):
        client.lease("first:1-x", gpu=1)
    assert (await client.ask("first:1-x")).data


async def test_closing_ends_waiting_calls(harbour):
    harbour.mute.add("why")
    client = Client(harbour.url)
    async with client, asyncio.timeout(60):
        asking = asyncio.create_task(client.why("r"))
        await asyncio.to_thread(harbour.wait_for, lambda: harbour.count("why") == 1)
        await client.close()
        with pytest.raises(MoorageError):
            await asking
