"""Tests of metrics from two Prometheus servers: a small one that misbehaves, and a real one."""

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from moorage.catalog.mirrored.prometheus import PrometheusPoller, PrometheusSource
from moorage.catalog.mirrored.samples import QUERIES
from moorage.catalog.opening import open_catalog
from moorage.storage.sqlite.records import SqliteRecords
from moorage.testing.daemon_process import daemon
from tests.sites import Answer, Site

NOW = 1_000_000.0
SECONDS_MAX = 30


def cluster(name="lab", *nodes):
    entries = [{"id": node, "gpus": {"count": 2}} for node in nodes or ("a", "b")]
    return {"id": name, "status": "live", "nodes": {"nodeData": entries}}


def vector(*series):
    rows = [{"metric": labels, "value": [NOW, value]} for labels, value in series]
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


class Small(Site):
    """An HTTP server that answers queries of Prometheus as a test orders."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.vectors: dict[str, object] = {}
        self.always: Answer = None
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        url = urlsplit(request.path)
        given = parse_qs(url.query)
        (query,) = given["query"]
        assert url.path == "/api/v1/query"
        if query == "vector(time())":
            return self.always or (200, vector(({}, str(NOW))))
        assert given["time"] == [str(NOW)]
        self.requests.append(query)
        return self.always or (200, self.vectors.get(query, vector()))


@pytest.fixture
def small() -> Iterator[Small]:
    with Small() as small:
        yield small


@pytest.fixture
async def catalog(tmp_path):
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"))
    await catalog.clusters.create(cluster())
    yield catalog
    await catalog.close()


@contextlib.asynccontextmanager
async def polling(catalog, url, **more):
    outcome: list[str] = []
    poller = PrometheusPoller(catalog, PrometheusSource(url=url, **more), outcome.append)
    try:
        yield poller, outcome
    finally:
        await poller.close()


def device(gpu="0", node="a", site="lab"):
    return {"gpu": gpu, "Hostname": node, "cluster": site}


async def test_a_round_of_reading_prometheus_sends_a_fixed_number_of_queries(small, catalog):
    names = [f"n{number}" for number in range(50)]
    await catalog.clusters.create(cluster("large", *names))
    rows = [(device(gpu, node, "large"), "7") for node in names for gpu in "01"]
    small.vectors["DCGM_FI_DEV_FB_USED"] = vector(*rows)
    async with polling(catalog, small.url) as (poller, outcome):
        assert not poller.up
        round_ = await poller.poll()
    assert small.requests == list(QUERIES)
    assert (poller.up, round_.fresh, outcome) == (True, 50, [])
    found = await catalog.metrics.get("large")
    assert [tree["gpu"]["totalUsedMem"] for tree in found["nodes"]] == [14] * 50
    assert found["cluster"]["gpu"]["count"] == 100
    assert await catalog.metrics.query({"clusterId": "lab"}) == []


async def test_values_that_are_not_finite_numbers_are_left_out(small, catalog):
    values = ("NaN", "+Inf", "1e3", "x", "1e300")
    rows = [(device(str(gpu)), value) for gpu, value in enumerate(values)]
    small.vectors["DCGM_FI_DEV_GPU_UTIL"] = vector(*rows)
    async with polling(catalog, small.url) as (poller, _):
        await poller.poll()
    (tree,) = (await catalog.metrics.get("lab"))["nodes"]
    assert tree["gpus"] == [{"gpu_id": 2, "cudaUtilization": 1000}]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>"), "answered 200 and no vector: '<html>'"),
        ((400, b'{"status": "error", "error": "bad query"}'), "answered 400: bad query"),
        ((401, b"Unauthorized"), "answered 401 and no vector: 'Unauthorized'"),
        ((503, b"starting"), "answered 503: 'starting'"),
        ((200, b'{"status": "success"}'), "answered 200: success"),
        (
            (200, b'{"status": "success", "data": {"resultType": "matrix", "result": []}}'),
            "answered 200 and no vector",
        ),
        (
            (200, b'{"status": "success", "data": {"resultType": "vector", "result": []}}'),
            "sends no valid time",
        ),
    ],
)
async def test_after_a_bad_answer_of_prometheus_the_last_values_stay_and_a_report_is_made_once(
    small, catalog, answer, said
):
    small.vectors["DCGM_FI_DEV_FB_USED"] = vector((device(), "7"))
    async with polling(catalog, small.url) as (poller, outcome):
        await poller.poll()
        small.always = answer
        await poller.poll()
        await poller.poll()
        assert len(outcome) == 1
        assert f"The Prometheus server at {small.url} {said}" in outcome[0]
        assert not poller.up
        (tree,) = (await catalog.metrics.get("lab"))["nodes"]
        # By this machine's clock, which counts without a server, the sample is old.
        assert (tree["stale"], tree["gpus"][0]["usedMem"]) == (True, 7)
        small.always = None
        async with asyncio.timeout(SECONDS_MAX):
            while not poller.up:  # After many failures, the poller pauses for a while.
                await poller.poll()
                await asyncio.sleep(0.05)  # No event reports the end of the pause.
        assert outcome[1].startswith("no longer unreachable: ")
        (tree,) = (await catalog.metrics.get("lab"))["nodes"]
        assert tree["stale"] is False


async def test_a_restart_marks_old_metrics_as_stale(small, catalog):
    small.vectors["DCGM_FI_DEV_FB_USED"] = vector((device(), "7"))
    async with polling(catalog, small.url) as (poller, _):
        await poller.poll()
    small.always = (503, b"")
    async with polling(catalog, small.url) as (poller, _):
        await poller.poll()
    assert (await catalog.metrics.get("lab"))["stale"] is True


async def test_metrics_that_clients_posted_are_not_changed(small, catalog):
    posted, _ = await catalog.metrics.put({"clusterId": "lab", "nodes": [{"id": "a"}]})
    async with polling(catalog, small.url) as (poller, outcome):
        await poller.poll()
    assert await catalog.metrics.get("lab") == posted
    assert outcome == ["it has no series of the DCGM exporter and of the node exporter"]


async def test_a_closed_reader_of_prometheus_stops_at_once(small, catalog):
    async with polling(catalog, small.url, interval_seconds=3600) as (poller, _):
        running = asyncio.create_task(poller.run())
        async with asyncio.timeout(SECONDS_MAX):
            while not poller.up:  # noqa: ASYNC110  # No event reports the end of a round.
                await asyncio.sleep(0.01)  # As above.
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len(small.requests) == len(QUERIES)


# The real Prometheus -----------------------------------------------------------------------------

PROMETHEUS = shutil.which("prometheus")


class Exporter:
    """A machine's exporters: two devices as DCGM names them, and memory as the node exporter."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        labels = ("gpu", "UUID", "device", "modelName", "Hostname")
        self.used = Gauge("DCGM_FI_DEV_FB_USED", "", labels, registry=registry)
        free = Gauge("DCGM_FI_DEV_FB_FREE", "", labels, registry=registry)
        util = Gauge("DCGM_FI_DEV_GPU_UTIL", "", labels, registry=registry)
        power = Gauge("DCGM_FI_DEV_POWER_USAGE", "", labels, registry=registry)
        heat = Gauge("DCGM_FI_DEV_GPU_TEMP", "", labels, registry=registry)
        for gpu in "01":
            series = (gpu, f"GPU-{gpu}", f"nvidia{gpu}", "NVIDIA A100-SXM4-80GB", "a")
            for gauge, value in ((self.used, 1024), (free, 3072), (util, 40), (power, 250.5)):
                gauge.labels(*series).set(value)
            heat.labels(*series).set(55)
        for name, value in (("MemTotal", 8 << 30), ("MemAvailable", 6 << 30)):
            Gauge(f"node_memory_{name}_bytes", "", registry=registry).set(value)
        Gauge("node_load5", "", registry=registry).set(1.5)
        uname = Gauge("node_uname_info", "", ("nodename",), registry=registry)
        uname.labels("a").set(1)
        self.server, self.thread = start_http_server(0, "127.0.0.1", registry)

    @property
    def port(self) -> int:
        return int(self.server.server_port)

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Prometheus:
    """The real server, scraping one exporter five times a second."""

    def __init__(self, folder, port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
            "scrape_configs:\n"
            f"- {{job_name: fleet, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}\n"
        )
        self.log = folder / "log"
        command = [
            PROMETHEUS,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={urlsplit(self.url).netloc}",
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(SECONDS_MAX)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    with contextlib.suppress(OSError):
        exporter.stop()


@pytest.fixture
def prometheus(tmp_path, exporter) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path, exporter.port)
    yield prometheus
    prometheus.stop()


async def until(http, is_so):
    """Return the metrics document of the cluster `lab` as soon as it meets a condition."""
    last = None
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            answer = await http.get("/cluster/lab")
            last = answer.json().get("data")
            if last is not None and is_so(last):
                return last
            await asyncio.sleep(0.05)  # No event reports new metrics.


async def until_up(http, value):
    """Wait until a metric says whether Prometheus answers; a slow answer counts as none."""
    async with asyncio.timeout(SECONDS_MAX):
        while f"moorage_prometheus_up {value}" not in (await http.get("/metrics")).text:  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.05)  # As above.


@pytest.mark.heavy
@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here: apt-get install prometheus")
async def test_a_real_prometheus_feeds_a_real_daemon(prometheus, exporter, tmp_path):
    settings = {
        "MOORAGE_PROMETHEUS_URL": prometheus.url,
        "MOORAGE_PROMETHEUS_CLUSTER": "lab",
        "MOORAGE_PROMETHEUS_INTERVAL_SECONDS": "0.1",
        "MOORAGE_PROMETHEUS_STALE_SECONDS": "2",
    }
    with daemon(environment=settings) as running:
        async with httpx.AsyncClient(base_url=running.http, timeout=SECONDS_MAX) as http:
            (await http.post("/clusters", json=cluster())).raise_for_status()
            found = await until(
                http, lambda document: document["nodes"][0].get("gpu", {}).get("totalMem")
            )
            (tree,) = found["nodes"]
            assert tree["gpus"][0] == {
                "gpu_id": 0,
                "usedMem": 1024,
                "freeMem": 3072,
                "totalMem": 4096,
                "memUtilization": 25.0,
                "cudaUtilization": 40,
                "powerUtilization": 250.5,
                "temperature": 55,
            }
            assert found["cluster"]["gpu"]["totalFreeMem"] == 6144
            exporter.used.labels("0", "GPU-0", "nvidia0", "NVIDIA A100-SXM4-80GB", "a").set(2048)
            found = await until(
                http, lambda document: document["nodes"][0]["gpus"][0]["usedMem"] == 2048
            )
            found = await until(http, lambda document: "memory" in document["nodes"][0])
            assert found["nodes"][0]["memory"]["freeMem"] == 6144
            assert found["nodes"][0]["vcpu"]["load_5m"] == 1.5
            assert not found["stale"]

            exporter.stop()
            found = await until(http, lambda document: document["stale"])
            assert found["nodes"][0]["gpus"][0]["usedMem"] == 2048
            await until_up(http, "1.0")

            prometheus.stop()
            await until_up(http, "0.0")
            assert 'moorage_prometheus_nodes{age="stale"} 1.0' in (await http.get("/metrics")).text
        assert "The Prometheus server at" in running.log.read_text()
