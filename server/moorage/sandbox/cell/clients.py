"""The objects in a policy's `settings`: the two documented clients, and one for its context.

Each method asks the host and answers as the documented class would
(docs/reference/allocation-server.md, "Policies"):
`cluster_client` returns `(True, data)` or `(False, message)` and never raises, the metrics client
returns data or raises.
"""

from collections.abc import Callable

import msgspec

from moorage.records.json_values import JsonObject, JsonValue
from moorage.sandbox.cell.missing import errors_of

CallHost = Callable[[str, str, list[JsonValue]], tuple[JsonValue, str, int]]
"""Takes client, method and arguments; returns data, error message (empty on success) and status."""


class _Response:
    """`error.response` of an error, with the parts that policies read."""

    def __init__(self, text: str, status: int) -> None:
        self.text = self.reason = text
        self.status_code = status
        self.ok = False

    def json(self) -> JsonObject:
        """Return the body of the service's answer."""
        return {"success": False, "error": self.text}


class APIError(errors_of("requests"), ValueError):  # type: ignore[misc]  # The class is made there.
    """A metrics service refused a call, or did not answer.

    The documented client raises `requests.exceptions.HTTPError` and other `RequestException`s,
    `ValueError` where the answer is not JSON, and `APIError`: this error is all of them.

    Args:
        status: HTTP status where there was one.
    """

    def __init__(self, error: str, status: int = 0) -> None:
        super().__init__(error)
        self.error = error
        self.status = status
        self.status_code = status
        self.response = _Response(error, status) if status else None


class ContextConflict(Exception):  # noqa: N818  # It names what happened, as authors say it.
    """Another request changed the context since the policy read it: read the context again.

    Args:
        version: The version that is current now.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"the context was changed meanwhile; it is at version {version} now")
        self.version = version


class ContextClient:
    """`settings["context_client"]`: the context that all cells of this policy version share.

    For policies that must know whether their change took effect. If another cell changed the
    context during `eval`, changes of the argument `context` are lost without an error; `swap`
    raises an error. A kill of the server may lose the swaps of the last second.
    """

    Conflict = ContextConflict

    def __init__(
        self,
        ask: Callable[[str, list[JsonValue]], tuple[int, bytes]],
        pack: Callable[[JsonValue], bytes],
    ) -> None:
        self._ask = ask
        self._pack = pack

    def read(self) -> tuple[JsonObject, int]:
        """Return the context and its version; `({}, 0)` if there is none yet."""
        version, packed = self._ask("read", [])
        return (msgspec.msgpack.decode(packed) if packed else {}), version

    def swap(self, context: JsonObject, version: int) -> int:
        """Replace the context if it still has this version; return its new version.

        Raises:
            ContextConflict: The context has another version; nothing was changed.
            TypeError: The context is not a dict of plain JSON values, or the version not a number.
            ValueError: The context is too large.
        """
        if not isinstance(context, dict):
            raise TypeError(f"the context must be a dict, not {type(context).__name__}")
        if type(version) is not int:
            found = type(version).__name__
            raise TypeError(f"the version must be the number that read() returned, not {found}")
        current, _ = self._ask("swap", [version, self._pack(context)])
        return current


class ClusterClient:
    """Reads cluster documents: the client in `settings["cluster_client"]`."""

    base_url = "moorage://cluster_client"

    def __init__(self, ask: CallHost) -> None:
        self._ask = ask

    def read_cluster(self, cluster_id: str) -> tuple[bool, JsonValue]:
        """Return `(True, cluster document)` or `(False, message)`."""
        return self._answer("read_cluster", cluster_id)

    def execute_query(self, query: JsonObject) -> tuple[bool, JsonValue]:
        """Return `(True, list of cluster documents)` or `(False, message)`."""
        return self._answer("execute_query", query)

    def _answer(self, method: str, argument: JsonValue) -> tuple[bool, JsonValue]:
        data, message, status = self._ask("cluster_client", method, [argument])
        if not message:
            return True, data
        return False, f"{'HTTP error' if status else 'Error'} occurred: {message}"


class _MetricsClient:
    """A client for metrics; a refusal of the service raises an error."""

    APIError = APIError
    name = ""

    def __init__(self, ask: CallHost) -> None:
        self._ask = ask

    def _answer(self, method: str, argument: JsonValue) -> JsonValue:
        data, message, status = self._ask(self.name, method, [argument])
        if message:
            raise APIError(message, status)
        return data


class GlobalClusterMetricsClient(_MetricsClient):
    """Reads cluster metrics: the client in `settings["cluster_metrics_client"]`."""

    name = "cluster_metrics_client"
    base_url = "moorage://cluster_metrics_client"

    def get_cluster(self, cluster_id: str) -> JsonValue:
        """Return the metrics of a cluster.

        Raises:
            APIError: The service has no such metrics, or refuses.
        """
        return self._answer("get_cluster", cluster_id)

    def query_clusters(self, query_params: JsonObject | None = None) -> JsonValue:
        """Return the metrics of all clusters that match a Mongo-style filter.

        Raises:
            APIError: The service refuses.
        """
        return self._answer("query_clusters", query_params)


class GlobalBlockMetricsClient(_MetricsClient):
    """Reads block metrics: `settings["block_metrics_api"]` of ranking policies."""

    name = "block_metrics_client"
    base_url = "moorage://block_metrics_client"

    def get_block(self, block_id: str) -> JsonValue:
        """Return the metrics of a block.

        Raises:
            APIError: The service has no such metrics, or refuses.
        """
        return self._answer("get_block", block_id)

    def query_blocks(self, query_params: JsonObject | None = None) -> JsonValue:
        """Return the metrics of all blocks that match a Mongo-style filter.

        Raises:
            APIError: The service refuses.
        """
        return self._answer("query_blocks", query_params)
