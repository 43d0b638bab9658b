"""Runs `moored serve` as a child process, with clusters and policies."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.testing.daemon_process import Running, ServerError, daemon
from moorage_policies import catalog

Document = JsonMapping
HTTP_SECONDS_MAX: Final = 30.0
"""Seconds that the server may take to register a cluster or a policy."""


class Server(Running):
    """A server that accepts requests: `ws` and `http` are its URLs, `log` is its log file."""

    __slots__ = ()

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the environment with which clients and `moorage` find this server."""
        return {"MOORAGE_URL": self.ws, "MOORAGE_HTTP_URL": self.http}

    def register(self, cluster: Document, token: str = "") -> None:
        """Add a cluster by its document.

        Raises:
            ServerError: The server refuses the cluster.
        """
        self._post("/clusters", cluster, token)

    def publish(self, policy: str | Path | Document, token: str = "") -> str:
        """Publish a policy and return its URI.

        Args:
            policy: The name of a shipped policy; the path of a Python file, which becomes version
                `1.0-test` of a policy named like the file; or a PolicyRule document.
            token: Token of the caller; "": none.

        Raises:
            ServerError: The server refuses the policy.
        """
        document: Document
        if isinstance(policy, Path):
            document = {
                "policy_rule_uri": f"{policy.stem}:1.0-test",
                "type": "python_class_v1",
                "code": policy.read_text(encoding="utf-8"),
            }
        else:
            document = catalog.document(policy) if isinstance(policy, str) else policy
        return str(self._post("/policy", document, token)["data"]["policy_rule_uri"])

    def _post(self, path: str, document: Document, token: str) -> JsonValue:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = httpx.post(
            self.http + path,
            json=document,
            headers=headers,
            timeout=HTTP_SECONDS_MAX,
            trust_env=False,
        )
        if not answer.is_success:
            raise ServerError(f"POST {path} was answered {answer.status_code}: {answer.text}")
        return answer.json()


@contextlib.contextmanager
def server(
    fleet: Sequence[Document] | None = None,
    *,
    policies: Sequence[str | Path | Document] = ("first_fit",),
    environment: Mapping[str, str] | None = None,
    data: Path | None = None,
    token: str = "",
) -> Iterator[Server]:
    """Run a server on free loopback ports until the block ends.

    Args:
        fleet: Cluster documents; None: `[fake_cluster()]`.
        policies: Published at the start, as by `Server.publish`.
        environment: Settings, as variables: `{"MOORAGE_TOKENS": "ann:secret-1"}`.
        data: The server's data directory, which stays; None: a temporary one.
        token: Token that registers clusters and policies, if the server requires tokens.

    Raises:
        ServerError: The server did not become ready, refused a document, or did not stop cleanly.
    """
    with daemon(data, environment=dict(environment or {})) as running:
        started = Server(running.ws, running.http, running.pid, running.log)
        for cluster in [fake_cluster()] if fleet is None else fleet:
            started.register(cluster, token)
        for policy in policies:
            started.publish(policy, token)
        yield started


def fake_cluster(
    name: str = "lab",
    *,
    nodes: int = 2,
    gpus: int = 4,
    model: str = "A100",
    gpu_memory_mib: int = 81_920,
    vcpus: int = 64,
    memory_mib: int = 262_144,
) -> JsonObject:
    """Return the document of a cluster whose nodes are alike, named `<name>-1` and so on."""
    devices = [{"modelName": model, "memory": gpu_memory_mib} for _ in range(gpus)]
    rows = [
        {
            "id": f"{name}-{number}",
            "gpus": {"count": gpus, "gpus": devices},
            "vcpus": {"count": vcpus},
            "memory": memory_mib,
        }
        for number in range(1, nodes + 1)
    ]
    return {"id": name, "nodes": {"count": nodes, "nodeData": rows}}
