"""What the HTTP front door needs from the daemon: the daemon implements it, `web.app` calls it.

The front door knows no other room. The methods on documents mirror those of the catalog; they
refuse with `protocol.faults.ServiceError`.
"""

from typing import Any, Literal, Protocol

Document = dict[str, Any]


class BlockDocumentServices(Protocol):
    """Block documents and block metrics; `kind` says which."""

    async def create(self, document: Document) -> Document:
        """Store a new block document and return it."""

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        """Store the metrics of a block; return them and whether it had none before."""

    async def get(self, kind: Literal["block", "block_metrics"], block_id: str) -> Document:
        """Return a document, or raise `not_found`."""

    async def update(
        self, kind: Literal["block", "block_metrics"], block_id: str, change: Document
    ) -> Document:
        """Change a document, as cluster documents are changed; raise `not_found`."""

    async def delete(self, kind: Literal["block", "block_metrics"], block_id: str) -> Document:
        """Delete a document and return it, or raise `not_found`."""

    async def query(
        self, kind: Literal["block", "block_metrics"], query: Document | None
    ) -> list[Document]:
        """Return the documents that match a filter, by id; None: all."""


class WebServices(Protocol):
    """Everything behind the HTTP endpoints."""

    def authenticate(self, bearer: str | None) -> str | None:
        """Return the tenant that a bearer token belongs to, or None to answer 401.

        Args:
            bearer: The token of the `Authorization` header, or None where there is none.

        """

    async def create_cluster(self, document: Document) -> Document:
        """Store a new cluster document and return it."""

    async def get_cluster(self, cluster_id: str) -> Document:
        """Return a cluster document."""

    async def update_cluster(self, cluster_id: str, change: Document) -> Document:
        """Replace or update (`$set`, `$unset`) a cluster document and return the new one."""

    async def delete_cluster(self, cluster_id: str) -> Document:
        """Delete a cluster document and return it."""

    async def query_clusters(self, query: Document) -> list[Document]:
        """Return the cluster documents that match a filter."""

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        """Store a metrics document; return it and whether the cluster had none before."""

    async def get_metrics(self, cluster_id: str) -> Document:
        """Return the metrics document of a cluster."""

    async def update_metrics(self, cluster_id: str, change: Document) -> Document:
        """Replace or update a metrics document and return the new one."""

    async def delete_metrics(self, cluster_id: str) -> Document:
        """Delete a metrics document and return it."""

    async def query_metrics(self, query: Document | None = None) -> list[Document]:
        """Return the metrics documents that match a filter; None: all."""

    async def aggregate_metrics(self, stages: Any) -> list[Document]:
        """Return what an aggregation pipeline makes of all metrics documents."""

    async def search(
        self, action: Literal["filter", "search"], body: Document, tenant: str
    ) -> tuple[list[Document], list[str]]:
        """Return the cluster documents that a filter or a similarity search finds, and warnings.

        Args:
            action: Which of the two.
            body: Bare, or in its envelope.
            tenant: On whose behalf a policy ranks.

        """

    async def publish_policy(self, document: Document, who: str) -> str:
        """Check and register a PolicyRule document for a tenant; return its URI."""

    async def get_policy(self, uri: str) -> Document:
        """Return a PolicyRule document."""

    async def update_policy(self, uri: str, change: Document, who: str) -> Document:
        """Change descriptive fields of a PolicyRule document and return the new one."""

    async def delete_policy(self, uri: str, who: str, *, force: bool) -> Document:
        """Delete a policy and return its document; by force, also what an alias falls back to."""

    async def policy_history(self, uri: str) -> list[Document]:
        """Return who changed a policy and when, the first change first; also of a removed one."""

    async def query_policies(self, query: Document | None = None) -> list[Document]:
        """Return the PolicyRule documents that match a filter; None: all."""

    async def manage_policy(self, uri: str, tenant: str, action: str, data: Document) -> Any:
        """Return what a policy's `management` returned; a version, an alias or a name."""

    async def policy_logs(self, uri: str, tenant: str) -> Document:
        """Return what a version printed and logged lately, at requests of this tenant."""

    def aliases(self) -> list[Document]:
        """Return all aliases without their histories."""

    def alias(self, alias: str) -> Document:
        """Return an alias: what it means, its canary and shadow, who changed it and when."""

    async def activate_policy(self, alias: str, uri: str, who: str) -> Document:
        """Make a version the one that an alias means; return the alias."""

    async def roll_back_policy(self, alias: str, who: str) -> Document:
        """Activate the version that was active before; return the alias."""

    async def start_canary(self, alias: str, body: Document, who: str) -> Document:
        """Send a share of an alias's requests to a candidate; return the alias."""

    async def stop_canary(self, alias: str, who: str) -> Document:
        """Send all requests to the active version again; return the alias."""

    def canary_report(self, alias: str, who: str) -> Document:
        """Return how the active version and the candidate do."""

    async def start_shadow(self, alias: str, uri: str, who: str) -> Document:
        """Ask a candidate what the active version is asked; return the alias."""

    async def stop_shadow(self, alias: str, who: str) -> Document:
        """Ask the candidate no more; return the alias."""

    def shadow_report(self, alias: str, who: str) -> Document:
        """Return how the candidate differs from the active version, as far as `who` may see it."""

    async def delete_alias(self, alias: str, who: str) -> Document:
        """Delete an alias of `who` and return it as it was."""

    async def create_executor(self, document: Document) -> Document:
        """Store a new executor document and return it."""

    async def get_executor(self, name: str) -> Document:
        """Return an executor document."""

    async def update_executor(self, name: str, change: Document) -> Document:
        """Replace or update (`$set`, `$unset`) an executor document and return the new one."""

    async def delete_executor(self, name: str) -> Document:
        """Delete an executor and return its document."""

    async def query_executors(self, query: Document | None = None) -> list[Document]:
        """Return the executor documents that match a filter; None: all."""

    async def execute_policy(self, executor: str, body: Document, tenant: str) -> Any:
        """Evaluate a policy on the input of the body; return what it returned."""

    @property
    def block_documents(self) -> BlockDocumentServices:
        """Blocks, as far as they are documents."""

    allocate_over_http: bool
    """Whether `POST /allocate` is served at all."""

    async def allocate(self, body: bytes, tenant: str) -> tuple[int, bytes]:
        """Answer `POST /allocate`, the HTTP twin of an ad-hoc request.

        Args:
            body: The request as it came, at most `BODY_BYTES_MAX` bytes.
            tenant: Who asks.

        Returns:
            The HTTP status and the JSON body.

        """

    async def select_clusters_for_block(self, body: Document, tenant: str) -> Any:
        """Return the clusters that a block's clusterAllocator selects, as it returned them.

        Args:
            body: The block document, bare or as `{"input": document}`.
            tenant: Who asks.

        """

    async def dry_run_block(self, body: Document, tenant: str) -> tuple[Any, list[str]]:
        """Return where a block would run, and warnings; arguments as above."""

    async def allocate_block(self, body: Document, tenant: str) -> str:
        """Return the id of a task that finds where a block would run; arguments as above."""

    async def block_task(self, task_id: str, tenant: str) -> Document:
        """Return `task_id`, `status` (`pending`, `completed`, `failed`), `result` or `error`."""

    async def readiness(self) -> tuple[bool, Document]:
        """Return whether requests can be served, and what says so, by component."""

    def metrics_text(self) -> bytes:
        """Return the server's own metrics in the Prometheus text format."""
