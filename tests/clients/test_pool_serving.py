"""Tests of a pool that processes share, with real sockets and holders that are killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
import yaml

from moorage.slots import InvalidCheckin, InvalidRequest, ResourceUnavailable, UnknownResourceType
from moorage_client import ConnectionFailed, ProtocolViolated
from moorage_client.pool import Checkout, ResourcePoolAdapter
from moorage_client.pool.adapter import ANSWER_BYTES_MAX
from moorage_client.pool.addresses import Tcp, Uds
from tests.clients import pools
from tests.clients.pools import SECONDS_MAX, comes_back, free, refusal

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

GPU = [{"type": "gpus", "slots": 1}]
serving = partial(pools.serving, "-r", "gpus=4", "-r", "cpus=2", "--address")


@pytest.fixture(scope="module", params=["uds", "tcp"])
def pool_server(request, tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("pool")
    where = f"uds:{folder}/pool.sock" if request.param == "uds" else "tcp:127.0.0.1:0"
    with serving(where) as (address, _):
        yield address


@pytest.fixture
def pool(pool_server) -> Iterator[ResourcePoolAdapter]:
    adapter = ResourcePoolAdapter(pool_server)
    yield adapter
    assert adapter.state()["holdings"] == [], "a test left something checked out"


def http_of(pool: ResourcePoolAdapter) -> httpx.Client:
    """Return an HTTP client of the served pool."""
    match pool.address:
        case Uds(path=path):
            transport = httpx.HTTPTransport(uds=str(path))
            return httpx.Client(transport=transport, base_url="http://pool", timeout=SECONDS_MAX)
        case Tcp(host=host, port=port):
            return httpx.Client(base_url=f"http://{host}:{port}", timeout=SECONDS_MAX)


HOLDER = """
import sys
from moorage_client.pool import ResourcePoolAdapter
print(ResourcePoolAdapter(sys.argv[1]).checkout([{"type": "gpus"}] * 2).transaction, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process that holds two GPUs; yield the process and its transaction."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, address], **pipes)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


class TestAdapter:
    """The adapter to a remote pool has the methods of a pool."""

    def test_the_adapter_has_the_methods_of_the_pool(self, pool):
        assert pool.types == ["cpus", "gpus"]
        assert not pool.empty()
        assert pool.count("gpus") == pool.count("gpu") == 4
        assert pool.accommodates(GPU * 4)
        reason = "insufficient slots of gpus (requested 5, available 4)"
        assert pool.accommodates(GPU * 5).reason == reason
        taken = pool.checkout([*GPU, {"type": "cpus", "slots": 0.5}])
        assert isinstance(taken, Checkout)
        assert taken == {"gpus": [{"id": "0", "slots": 1}], "cpus": [{"id": "0", "slots": 0.5}]}
        assert yaml.safe_load(yaml.safe_dump(taken)) == json.loads(json.dumps(taken)) == taken
        assert free(pool, "cpus") == 1.5
        pool.checkin(taken)
        assert (free(pool), free(pool, "cpus")) == (4, 2)

    def test_the_adapter_raises_the_errors_of_the_pool(self, pool):
        for request, error, said in (
            (GPU * 5, ResourceUnavailable, "insufficient slots of gpus"),
            ([{"type": "apples"}], UnknownResourceType, "'apples'"),
            ([{"type": "gpus", "slots": -1}], InvalidRequest, "member 0"),
            *((wrong, InvalidRequest, "expected a list of members") for wrong in (None, 5, "gpus")),
            (object(), InvalidRequest, "cannot be sent"),
        ):
            with pytest.raises(error, match=said):
                pool.checkout(request)
        for wrong in (None, 5, "gpus", {"type": "gpus"}):
            with pytest.raises(InvalidRequest):
                pool.accommodates(wrong)
        pool.checkin(pool.checkout(iter(GPU)))
        assert free(pool) == 4

    def test_a_checkout_can_be_returned_only_once_and_only_with_its_own_slots(self, pool):
        first, second = pool.checkout(GPU), pool.checkout(GPU)
        more = Checkout({"gpus": [*first["gpus"], {"id": "1", "slots": 1}]}, first.transaction)
        with pytest.raises(InvalidCheckin):
            pool.checkin(more)
        pool.checkin(first)
        with pytest.raises(InvalidCheckin, match=first.transaction):
            pool.checkin(first)
        pool.checkin(second.transaction)
        with pytest.raises(InvalidCheckin):
            pool.checkin(dict(second))

    def test_the_state_lists_holders_and_slots(self, pool):
        taken = pool.checkout(GPU, ttl_seconds=100)
        (holding,) = pool.state()["holdings"]
        assert holding["transaction"] == taken.transaction
        assert (holding["pid"], holding["resources"]) == (os.getpid(), taken)
        assert 0 < holding["expires_at"] - holding["since"] <= 101
        pool.checkin(taken)


class TestEndpoints:
    """The HTTP calls work for the documented client, which sends no processes or transactions."""

    @pytest.fixture
    def http(self, pool) -> Iterator[httpx.Client]:
        with http_of(pool) as http:
            yield http

    def test_each_http_call_has_the_documented_answer(self, http):
        assert http.get("/types").json() == {"types": ["cpus", "gpus"]}
        assert http.post("/count", json="gpus").json() == {"count": 4}
        assert http.post("/accommodates", json=GPU).json() == {"ok": True, "reason": None}
        assert http.post("/accommodates", json={"request": GPU}).json()["ok"]
        answer = http.post("/checkout", json=GPU)
        assert answer.status_code == 200
        assert answer.json()["resources"] == {"gpus": [{"id": "0", "slots": 1}]}
        too_many = http.post("/checkout", json=GPU * 4)
        assert (too_many.status_code, too_many.json()["error"]) == (404, "ResourceUnavailable")
        assert http.post("/count", json="apples").status_code == 404
        assert http.post("/checkin", json=answer.json()["resources"]).json() == {"ok": True}
        again = http.post("/checkin", json=answer.json()["resources"])
        assert (again.status_code, again.json()["error"]) == (400, "InvalidCheckin")

    @pytest.mark.parametrize(
        ("path", "body", "said"),
        [
            ("/checkout", {"request": GPU, "pid": 0}, "pid"),
            ("/checkout", {"request": GPU, "pid": "1"}, "pid"),
            ("/checkout", {"request": GPU, "pid": 2**22 + 1}, "no process"),
            ("/checkout", {"request": GPU, "pid": 2**64}, "no process"),
            ("/checkout", {"request": GPU, "ttl_seconds": 0}, "ttl_seconds"),
            ("/checkout", {"request": GPU, "ttl_seconds": 1e9}, "ttl_seconds"),
            ("/checkout", {"request": GPU, "colour": 1}, "colour"),
            ("/checkout", {}, "expected a list"),
            ("/checkout", False, "expected a list"),
            ("/checkin", False, "no checkout holds"),
            ("/checkin", {"gpus": []}, "no checkout holds"),
            ("/count", 3, "name of a type"),
            ("/renew", {"transaction": "x", "ttl_seconds": 5}, "'x' does not hold"),
            ("/renew", 3, "expected an object"),
        ],
    )
    def test_errors_name_the_wrong_field(self, http, path, body, said):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert said in answer.json()["message"]

    def test_only_json_of_a_bounded_size_is_read(self, http):
        json_type = {"Content-Type": "application/json"}
        for content, headers, said in (
            (b"[]", {"Content-Type": "text/plain"}, "application/json"),
            (b"[", json_type, "not JSON"),
            (b"[" * 100_000, json_type, "not JSON"),
            (b" " * 2_000_000, json_type, "bytes"),
        ):
            answer = http.post("/checkout", content=content, headers=headers)
            assert answer.status_code == 400
            assert said in answer.json()["message"]

    def test_a_pool_on_a_tcp_port_refuses_requests_of_web_pages(self, http, pool):
        for headers in (
            *({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}),
            {"Sec-Fetch-Site": "cross-site"},
        ):
            for method, path in (("GET", "/state"), ("POST", "/checkout"), ("GET", "/nothing")):
                answer = http.request(method, path, headers=headers, json=GPU)
                if isinstance(pool.address, Uds):  # A browser cannot open a Unix socket.
                    assert answer.status_code != 403
                else:
                    assert (answer.status_code, answer.json()["error"]) == (403, "Forbidden")
        for holding in pool.state()["holdings"]:
            pool.checkin(holding["transaction"])


class TestHolders:
    """Slots become free when their holder ends."""

    def test_a_killed_process_releases_its_slots(self, pool):
        with holder(str(pool.address)) as (process, transaction):
            assert free(pool) == 2
            with pytest.raises(ResourceUnavailable):
                pool.checkout(GPU * 3)
            process.send_signal(signal.SIGKILL)
            assert comes_back(pool, 4)
        with pytest.raises(InvalidCheckin, match="its process died"):
            pool.checkin(transaction)

    def test_a_process_may_hold_several_checkouts_and_end_some_of_them(self, pool):
        with holder(str(pool.address)) as (process, transaction):
            mine = pool.checkout(GPU, pid=process.pid)
            also = pool.checkout(GPU, pid=process.pid)
            pool.checkin(mine)
            pool.checkin(transaction)
            assert free(pool) == 3
            process.kill()
            assert comes_back(pool, 4)
        with pytest.raises(InvalidCheckin):
            pool.checkin(also)

    def test_slots_that_are_not_renewed_are_released_in_time(self, pool):
        brief, long = pool.checkout(GPU, ttl_seconds=0.2), pool.checkout(GPU, ttl_seconds=1)
        assert pool.renew(long, 600) > time.time() + 500
        assert comes_back(pool, 3)
        for call in (lambda: pool.renew(brief, 600), lambda: pool.checkin(brief)):
            with pytest.raises(InvalidCheckin, match="its time was up"):
                call()
        pool.checkin(long)


WORKER = """
import pathlib, random, sys
from moorage.slots import ResourceUnavailable
from moorage_client.pool import ResourcePoolAdapter
address, seed, owners = sys.argv[1], int(sys.argv[2]), sys.argv[3]
draw, granted = random.Random(seed), 0
pool = ResourcePoolAdapter(address)
while granted < 20:
    try:
        taken = pool.checkout([{"type": "gpus"}] * draw.randint(1, 3))
    except ResourceUnavailable:
        continue
    granted += 1
    # A holder of a GPU makes its file; were it there already, another would hold it.
    files = [pathlib.Path(owners, row["id"]) for row in taken["gpus"]]
    for file in files:
        file.touch(exist_ok=False)
    for file in files:
        file.unlink()
    pool.checkin(taken)
print("done", granted)
"""


def test_processes_never_hold_the_same_slot(pool_server, tmp_path):
    command = [sys.executable, "-c", WORKER, pool_server]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(n), tmp_path], **pipes) for n in range(3)]
    for each in workers:
        out, err = each.communicate(timeout=120)
        assert out == "done 20\n", err
    pool = ResourcePoolAdapter(pool_server)
    assert free(pool) == 4
    assert pool.state()["holdings"] == []


class Flood(BaseHTTPRequestHandler):
    """A server that is not a pool, and whose answer does not end."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(1 << 20))


def test_an_oversized_answer_is_not_read_to_its_end():
    with HTTPServer(("127.0.0.1", 0), Flood) as flood:
        answering = threading.Thread(target=flood.handle_request)
        answering.start()
        adapter = ResourcePoolAdapter(f"tcp:127.0.0.1:{flood.server_port}")
        with pytest.raises(ProtocolViolated, match=f"more than {ANSWER_BYTES_MAX} bytes"):
            adapter.empty()
        answering.join()


def test_threads_share_an_adapter(pool):
    def work() -> None:
        for _ in range(10):
            with contextlib.suppress(ResourceUnavailable):
                pool.checkin(pool.checkout(GPU))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(SECONDS_MAX)
    assert free(pool) == 4


class TestServing:
    def test_the_socket_belongs_to_its_user_alone_and_ends_with_the_server(self, tmp_path):
        path = tmp_path / "new" / "pool.sock"
        with serving(f"uds:{path}") as (address, _):
            assert oct(path.stat().st_mode)[-3:] == "600"
            assert oct(path.parent.stat().st_mode)[-3:] == "700"
            assert "served" in refusal("--address", address)
            assert ResourcePoolAdapter(address).count("gpus") == 4
        assert not path.exists()
        with pytest.raises(ConnectionFailed, match="No such file"):
            ResourcePoolAdapter(address).count("gpus")

    def test_the_socket_of_a_killed_server_is_taken_over(self, tmp_path):
        where = f"uds:{tmp_path}/pool.sock"
        pool = ResourcePoolAdapter(where)
        with serving(where) as (_, process):
            old = pool.checkout(GPU)
            process.kill()
            process.wait()
        with pytest.raises(ConnectionFailed):
            pool.count("gpus")
        with serving(where):
            same = pool.checkout(GPU)
            assert same == old
            with pytest.raises(InvalidCheckin, match="restarted"):
                pool.checkin(old)
            pool.checkin(same)

    def test_slots_that_are_taken_without_a_ttl_get_the_ttl_of_the_server(self, tmp_path):
        file = tmp_path / "pool.yaml"
        file.write_text("resource_pool:\n  resources:\n    gpus:\n    - {id: left, slots: 2}\n")
        options = ("--resource-pool-file", str(file), "-r", "gpus=1", "--ttl", "0.05")
        with serving(f"uds:{tmp_path}/s", *options) as (address, _):
            pool = ResourcePoolAdapter(address)
            with http_of(pool) as http:
                taken = http.post("/checkout", json=GPU).json()["resources"]
            assert taken == {"gpus": [{"id": "0", "slots": 1}]}, "the options win over the file"
            assert comes_back(pool, 1)
