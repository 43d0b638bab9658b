# ruff: noqa: PT012, SIM117  # These blocks are what is tested: errors come out of their ends.
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moorage_client import (
    BlockingClient,
    ConnectionFailed,
    LeaseLost,
    MoorageError,
    NeverFits,
    Timeout,
)


def test_the_blocking_client_has_the_methods_of_the_async_client(harbour):
    with BlockingClient(harbour.url) as client:
        lease = client.ask("first:1-x", lease={"ttl_seconds": 60}).lease
        assert client.renew(lease.id, lease.token, 120).ttl_seconds == 120
        assert client.status(lease.id)["fencing"] == 1
        assert client.why("r-0")["request"] == "r-0"
        assert [found.id for found in client.leases()] == [lease.id]
        assert client.queue()[0]["request"] == "r-9"
        assert client.fleet()[0]["cluster_id"] == "c0"
        assert client.fleet("c0")[0]["node_id"] == "n1"
        assert client.cancel("r-9")["state"] == "cancelled"
        assert client.manage("first:1-x", "poke") == {"did": "poke"}
        assert client.call({"op": "fleet"})["next"] is None
        assert client.release(lease.id, lease.token).state == "ended"
        with pytest.raises(NeverFits):
            client.ask("huge:1-x")


def test_threads_share_a_client(harbour):
    def work(number):
        answer = client.ask("first:1-x", inputs={"say": number})
        with client.lease("first:1-x", ttl_seconds=60) as held:
            return answer.data, held.id

    with BlockingClient(harbour.url) as client, ThreadPoolExecutor(8) as pool:
        done = list(pool.map(work, range(40)))
    assert [number for number, _ in done] == list(range(40))
    assert len({lease for _, lease in done}) == 40
    assert len(harbour.headers) == 1
    assert {lease["state"] for lease in harbour.leases.values()} == {"ended"}


def test_a_slow_answer_delays_no_other_thread(harbour):
    with BlockingClient(harbour.url) as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.ask, "slow:1-x")
        assert client.ask("first:1-x").data
        assert not slow.done()
        harbour.gate.set()
        assert slow.result(60).data


def test_a_lease_is_renewed_while_its_block_computes(harbour):
    with BlockingClient(harbour.url) as client, client.lease("first:1-x", ttl_seconds=2) as held:
        while harbour.count("renew") < 2:
            sum(range(1000))  # The block only computes.
            held.check()
    assert harbour.leases[held.id]["state"] == "ended"


def test_a_block_notices_a_lost_lease_and_raises_lease_lost_at_its_end(harbour):
    with BlockingClient(harbour.url) as client:
        with pytest.raises(LeaseLost, match="preempted"):
            with client.lease("first:1-x", ttl_seconds=0.6) as held:
                harbour.leases[held.id] |= {"state": "ended", "reason": "preempted"}
                assert held.wait_lost(60)
                with pytest.raises(LeaseLost):
                    held.check()
        assert harbour.count("release") == 0


def test_a_failed_release_is_reported_without_hiding_the_error_of_the_block(harbour):
    with BlockingClient(harbour.url, timeout=0.15) as client:
        with pytest.raises(Timeout), client.lease("first:1-x"):
            harbour.mute.add("release")
        with pytest.raises(ZeroDivisionError) as caught, client.lease("first:1-x"):
            raise ZeroDivisionError
    assert "no reply within" in caught.value.__notes__[0]


def test_a_client_that_finds_no_server_leaves_no_thread_behind(nowhere):
    before = threading.active_count()
    with pytest.raises(ConnectionFailed):
        BlockingClient(nowhere).__enter__()
    assert threading.active_count() == before


def test_a_closed_client_refuses_calls_and_says_that_it_is_closed(harbour):
    client = BlockingClient(harbour.url)
    with pytest.raises(MoorageError, match="not open"):
        client.ask("first:1-x")
    with client:
        assert client.ask("first:1-x").data
    client.close()
    with pytest.raises(MoorageError, match="not open"):
        client.ask("first:1-x")


def test_a_client_that_is_never_closed_does_not_hold_up_the_end_of_the_process(harbour):
    program = f"""
        from moorage_client import BlockingClient
        client = BlockingClient({harbour.url!r}).__enter__()
        guard = client.lease("first:1-x", ttl_seconds=60)
        print(guard.__enter__().id, flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("l-1\n", 0)
