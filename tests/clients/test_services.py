import base64
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

import pytest
import requests

from moorage_client import (
    APIError,
    ClusterClient,
    ConnectionFailed,
    GlobalClusterMetricsClient,
    NotFound,
    ProtocolViolated,
    RequestRefused,
    Services,
    Timeout,
)
from moorage_client.services import ANSWER_BYTES_MAX
from tests.sites import Answer, Site


class Registry(Site):
    """A server that answers each request as the test prepared, and records the request."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, object]] = {}
        self.heard: list[tuple[str, str, object]] = []
        self.open = threading.Event()
        self.open.set()
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        self.heard.append((request.command, request.path, json.loads(body) if body else None))
        self.open.wait(60)
        missing = (404, {"error": "Cluster not found"})
        return self.answers.get(f"{request.command} {unquote(request.path)}", missing)


@pytest.fixture
def registry(monkeypatch) -> Iterator[Registry]:
    with Registry() as registry:
        monkeypatch.setenv("CLUSTER_SERVICE_URL", registry.url)
        monkeypatch.setenv("GLOBAL_CLUSTER_METRICS_URL", registry.url + "/")
        yield registry
        registry.open.set()


def test_the_cluster_client_answers_in_tuples_and_never_raises(registry, monkeypatch):
    registry.answers["GET /clusters/c0"] = (200, {"id": "c0"})
    registry.answers["GET /clusters/c1"] = (200, b"not json")
    registry.answers["POST /clusters/query"] = (200, [{"id": "c0"}])
    client = ClusterClient()
    assert client.read_cluster("c0") == (True, {"id": "c0"})
    assert client.execute_query({"id": {"$in": ["c0"]}}) == (True, [{"id": "c0"}])
    assert registry.heard[-1][2] == {"query": {"id": {"$in": ["c0"]}}}
    assert client.read_cluster("../../admin?x=1#y")[0] is False
    assert registry.heard[-1][1] == "/clusters/..%2F..%2Fadmin%3Fx%3D1%23y"
    found, message = client.read_cluster("c9")
    assert (found, message.startswith("HTTP error occurred: 404 Client Error")) == (False, True)
    found, message = client.read_cluster("c1")
    assert (found, message.startswith("Error occurred: ")) == (False, True)
    monkeypatch.setenv("CLUSTER_SERVICE_URL", "http://127.0.0.1:1")
    found, message = ClusterClient().execute_query({})
    assert (found, message.startswith("Error occurred: ")) == (False, True)


def test_the_error_says_that_an_answer_came_from_a_proxy(registry):
    registry.answers["POST /clusters/query"] = (502, b"<html><title>502 Bad Gateway</title></html>")
    with (
        Services(registry.url) as services,
        pytest.raises(ConnectionFailed, match="HTTP 502 Bad Gateway, from a proxy") as failed,
    ):
        services.clusters()
    assert not isinstance(failed.value, ProtocolViolated)


def test_the_metrics_client_returns_data_and_raises_errors(registry):
    registry.answers["GET /cluster/c0"] = (200, {"success": True, "data": {"clusterId": "c0"}})
    registry.answers["POST /cluster/query"] = (200, {"success": True, "data": [{"n": 1}]})
    registry.answers["GET /cluster/c1"] = (200, {"success": False, "error": "gone"})
    registry.answers["GET /cluster/c2"] = (200, {"success": False})
    registry.answers["GET /cluster/c3"] = (200, b"not json")
    client = GlobalClusterMetricsClient()
    assert client.base_url == registry.url
    assert client.get_cluster("c0") == {"clusterId": "c0"}
    assert client.query_clusters({"clusterId": {"$in": ["c0"]}}) == [{"n": 1}]
    assert registry.heard[-1][2] == {"clusterId": {"$in": ["c0"]}}
    del registry.answers["POST /cluster/query"]  # As documented, only GET exists.
    registry.answers["GET /cluster/query?clusterId=c0"] = (200, {"success": True, "data": []})
    assert client.query_clusters({"clusterId": "c0"}) == []
    with pytest.raises(APIError, match="gone") as caught:
        client.get_cluster("c1")
    assert caught.value.status_code == 200
    with pytest.raises(APIError, match="Unknown error"):
        client.get_cluster("c2")
    with pytest.raises(ValueError, match="Expecting value"):
        client.get_cluster("c3")
    with pytest.raises(requests.HTTPError):
        client.get_cluster("c4")


def test_without_environment_variables_clients_use_the_embedded_services(monkeypatch):
    monkeypatch.delenv("CLUSTER_SERVICE_URL", raising=False)
    monkeypatch.delenv("GLOBAL_CLUSTER_METRICS_URL", raising=False)
    assert ClusterClient().base_url == "http://127.0.0.1:8080"
    assert GlobalClusterMetricsClient().base_url == "http://127.0.0.1:8080"


def test_the_services_client_publishes_reads_and_deletes_policies(registry):
    uri = {"policy_rule_uri": "a:1-x"}
    registry.answers["POST /policy"] = (201, {"success": True, "data": uri})
    registry.answers["GET /policy/a:1-x"] = (200, {"success": True, "data": uri})
    registry.answers["POST /policy/query"] = (200, {"success": True, "data": [uri]})
    registry.answers["DELETE /policy/a:1-x"] = (200, {"success": True, "data": uri})
    with Services(registry.url) as services:
        assert services.publish_policy({"name": "a"}) == "a:1-x"
        assert services.policy("a:1-x") == uri
        assert services.policies() == [uri]
        services.delete_policy("a:1-x")
        with pytest.raises(NotFound, match="Cluster not found"):
            services.policy("b:1-x")


def test_the_services_client_registers_clusters(registry):
    refusal = {"success": False, "message": "there", "error": {"code": "already_exists"}}
    registry.answers["POST /clusters"] = (409, refusal)
    registry.answers["PUT /clusters/c0"] = (200, {"id": "c0"})
    registry.answers["POST /clusters/query"] = (200, [{"id": "c0"}])
    with Services(registry.url) as services:
        assert services.put_cluster({"id": "c0"}) == {"id": "c0"}
        assert services.clusters() == [{"id": "c0"}]
        registry.answers["POST /clusters"] = (400, {"message": "id: expected a string"})
        with pytest.raises(RequestRefused, match="expected a string"):
            services.put_cluster({"id": 1})


def test_failing_services_raise_errors(registry):
    registry.answers["POST /policy/query"] = (200, b"<html>")
    registry.answers["POST /policy"] = (200, [1])
    with Services(registry.url, timeout=0.2) as services:
        with pytest.raises(ProtocolViolated):
            services.policies()
        with pytest.raises(ProtocolViolated):
            services.publish_policy({})
        registry.open.clear()
        with pytest.raises(Timeout):
            services.policies()
    with Services("http://127.0.0.1:1") as services, pytest.raises(ConnectionFailed) as caught:
        services.policies()
    assert caught.value.reason == "Connection refused"


def test_a_too_long_answer_is_not_read_to_its_end(registry):
    registry.answers["POST /policy/query"] = (200, bytes(ANSWER_BYTES_MAX + 1))
    registry.answers["GET /clusters/a"] = registry.answers["POST /policy/query"]
    what = f"more than {ANSWER_BYTES_MAX} bytes"
    with Services(registry.url) as services, pytest.raises(ProtocolViolated, match=what):
        services.policies()
    assert ClusterClient().read_cluster("a") == (False, f"Error occurred: {what}")


@pytest.fixture
def push(registry, shell):
    """Push a file as a policy; return the process and the document that arrived."""

    def push(*words):
        accepted = (201, {"success": True, "data": {"policy_rule_uri": "U"}})
        registry.answers.setdefault("POST /policy", accepted)
        done = shell("policy", "push", *map(str, words), "--http-url", registry.url)
        return done, next((body for _, path, body in registry.heard if path == "/policy"), None)

    return push


def test_push_sends_a_source_file_unchanged(push, tmp_path):
    (tmp_path / "rule.py").write_text("class AIOSv1PolicyRule: ...")
    words = ("--uri", "a.b:v1.0-beta-2", "--parameters", '{"x": 1}')
    done, document = push(tmp_path / "rule.py", "--no-test", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "U\n", "")
    assert document["code"] == "class AIOSv1PolicyRule: ..."
    assert (document["name"], document["version"]) == ("a.b", "v1.0")
    assert document["release_tag"] == "beta-2"
    assert document["policy_parameters"] == {"x": 1}


def test_push_packs_a_directory(push, tmp_path):
    code = tmp_path / "rule" / "code"
    (code / "__pycache__").mkdir(parents=True)
    (code / "function.py").write_text("import helper")
    (code / "helper.py").write_text("x = 1")
    (code / "__pycache__" / "x.pyc").write_text("")
    words = ("--no-test", "--name=a", "--version=1", "--tag=x", "--json")
    done, document = push(code.parent, *words)
    assert json.loads(done.stdout) == {"policy_rule_uri": "U"}
    content = base64.b64decode(document["code"])
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == ["code/function.py", "code/helper.py"]
    (code.parent / "examples.json").write_text("[]")
    lost, _ = push(code.parent, "--uri=a:1-x")
    assert lost.returncode == 2
    assert "examples.json would not be uploaded; put it into" in " ".join(lost.stderr.split())


def test_push_passes_an_archive_on(push, tmp_path):
    (tmp_path / "rule.zip").write_bytes(b"PK\x03\x04 and so on")
    _, document = push(tmp_path / "rule.zip", "--uri=a:1-x", "--no-test")
    assert base64.b64decode(document["code"]) == b"PK\x03\x04 and so on"


def test_push_quotes_the_server_if_it_refuses_a_policy(registry, push, tmp_path):
    error = {"code": "bad_policy", "reason": "line 1: invalid syntax", "line": 1}
    registry.answers["POST /policy"] = (400, {"success": False, "message": "no", "error": error})
    (tmp_path / "rule.py").write_text("class")
    done, _ = push(tmp_path / "rule.py", "--uri=a:1-x")
    assert done.returncode == 6
    assert "line 1: invalid syntax" in done.stderr
    assert "Line: 1" in done.stderr
