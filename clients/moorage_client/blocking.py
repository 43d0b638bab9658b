"""The blocking client: `Client` for programs without an event loop.

The client and its renewals run on a thread of their own, so that a long computation of the program
loses no lease. All threads of the program may share one client.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from moorage.lazy import LazyModule
from moorage.records.fields import TTL_SECONDS
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage_client.client import RECONNECT_SECONDS, TIMEOUT_SECONDS, Client

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Unpack

    from moorage import model
    from moorage.model import LeaseTerms
    from moorage_client import asking, errors, guard, loops, watching
    from moorage_client.answers import Answer, Lease
    from moorage_client.asking import Request
    from moorage_client.guard import BlockingGuard
    from moorage_client.listing import Listing
    from moorage_client.loops import LoopThread
    from moorage_client.watching import News
else:  # As in `client`.
    model = LazyModule("moorage.model")
    asking = LazyModule("moorage_client.asking")
    errors = LazyModule("moorage_client.errors")
    guard = LazyModule("moorage_client.guard")
    loops = LazyModule("moorage_client.loops")
    watching = LazyModule("moorage_client.watching")

T = TypeVar("T")


def _nothing() -> None:
    """Do nothing when a lease is lost: no thread can be interrupted; blocks check `held.lost`."""


class BlockingClient:
    """A client of one server, for any number of threads.

        with BlockingClient() as client:
            answer = client.ask("first_fit:1.0-stable", resources={"gpus": 1})

    Methods and errors are those of `Client`, which documents them. Methods that list objects return
    all of them at once. A client does not survive `fork`: make it in the process that uses it.

    Args:
        url: URL of the server, or of several, separated by commas; default `MOORAGE_URL`, else
            `ws://127.0.0.1:8765`.
        token: The token of the caller; default `MOORAGE_TOKEN`, else the file `MOORAGE_TOKEN_FILE`,
            else none.
        timeout: Longest time for a reply in seconds, in addition to `wait_seconds` and
            `deadline_seconds`.
        reconnect_seconds: How long to try to replace a broken socket.
        ca_file: PEM file of the authority that signed the server's certificate; default
            `MOORAGE_CA_FILE`, else `SSL_CERT_FILE`, else the authorities that this machine knows.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        reconnect_seconds: float = RECONNECT_SECONDS,
        ca_file: str | None = None,
    ) -> None:
        self._make_client = partial(
            Client,
            url,
            token,
            timeout=timeout,
            reconnect_seconds=reconnect_seconds,
            ca_file=ca_file,
        )
        self._thread: LoopThread | None = None
        self._client: Client | None = None
        self._news: set[News] = set()

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("this client is open already, or was closed; make a new one")
        self._thread = loops.LoopThread("moorage-client")
        self._client = self._make_client(renewals_on=self._thread)
        try:
            self._thread.run(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and end the thread; unreleased leases last until their TTL."""
        client, self._client = self._client, None
        if client is not None and self._thread is not None:
            try:
                for news in tuple(self._news):
                    news.close()
                self._thread.run(client.close())
            finally:
                self._thread.stop()

    def ask(
        self,
        policy_rule_uri: str,
        *,
        lease: LeaseTerms | JsonMapping | None = None,
        on_progress: Callable[[JsonMapping], None] | None = None,
        timeout: float | None = None,
        **request: Unpack[Request],
    ) -> Answer:
        """Ask a policy for a placement; see `Client.ask`. `on_progress` runs on another thread."""
        client = self._open()
        answer = client.ask(
            policy_rule_uri, lease=lease, on_progress=on_progress, timeout=timeout, **request
        )
        return self._run(answer)

    def lease(
        self,
        policy_rule_uri: str,
        *,
        ttl_seconds: float = TTL_SECONDS,
        wait_seconds: float = 0.0,
        priority: int = 0,
        preemptible: bool = False,
        idempotency_key: str = "",
        ttl_seconds_min: float = 0.0,
        on_progress: Callable[[JsonMapping], None] | None = None,
        timeout: float | None = None,
        **request: Unpack[Request],
    ) -> BlockingGuard:
        """Hold a lease while a block runs: `with client.lease(…) as held:`.

        This works as `Client.lease`, except that a thread cannot be interrupted: when the lease is
        lost, `held.lost` becomes true, `held.check()` raises `LeaseLost`, and so does the end of
        the block. Long work calls `held.check()` between its steps.
        """
        client = self._open()
        given = (ttl_seconds, wait_seconds, priority, preemptible, idempotency_key)
        terms = model.LeaseTerms(*given, ttl_seconds_min=ttl_seconds_min)
        message = asking.request_message(policy_rule_uri, terms, **request)
        return guard.BlockingGuard(
            lambda: self._run(client.acquire(message, timeout, on_progress)),
            lambda held: client.keep(held, _nothing),
            lambda held: self._run(client.hand_back(held)),
        )

    def renew(
        self,
        lease: str,
        token: str,
        ttl_seconds: float | None = None,
        *,
        timeout: float | None = None,
    ) -> Lease:
        """Extend a lease; see `Client.renew`."""
        return self._run(self._open().renew(lease, token, ttl_seconds, timeout=timeout))

    def release(self, lease: str, token: str | None = None) -> Lease:
        """End a lease; see `Client.release`."""
        return self._run(self._open().release(lease, token))

    def status(self, subject: str) -> JsonObject:
        """Return a lease or waiter; see `Client.status`."""
        return self._run(self._open().status(subject))

    def why(self, subject: str, *, nodes: bool = False) -> JsonObject:
        """Return the reasons of an answer; see `Client.why`."""
        return self._run(self._open().why(subject, nodes=nodes))

    def flush(self, cluster: str = "") -> list[str]:
        """End your warm leases; see `Client.flush`."""
        return self._run(self._open().flush(cluster))

    def cordon(self, cluster: str, node: str = "", reason: str = "") -> JsonObject:
        """Stop new leases on a node or cluster; see `Client.cordon`."""
        return self._run(self._open().cordon(cluster, node, reason))

    def drain(
        self, cluster: str, node: str = "", reason: str = "", *, seconds: float | None = None
    ) -> JsonObject:
        """Stop new leases, and end or move those that exist; see `Client.drain`."""
        return self._run(self._open().drain(cluster, node, reason, seconds=seconds))

    def uncordon(self, cluster: str, node: str = "") -> JsonObject:
        """Undo a cordon or a drain; see `Client.uncordon`."""
        return self._run(self._open().uncordon(cluster, node))

    def forget(self, cluster: str, node: str) -> JsonObject:
        """Remove a machine that will not come back; see `Client.forget`."""
        return self._run(self._open().forget(cluster, node))

    def cancel(self, request: str) -> JsonObject:
        """Cancel a waiting request; see `Client.cancel`."""
        return self._run(self._open().cancel(request))

    def leases(self, **filters: JsonValue) -> list[Lease]:
        """Return the leases that match the filters; see `Client.leases`."""
        return self._list(self._open().leases(**filters))

    def queue(self, **filters: JsonValue) -> list[JsonObject]:
        """Return the waiting requests; see `Client.queue`."""
        return self._list(self._open().queue(**filters))

    def fleet(self, cluster: str | None = None) -> list[JsonObject]:
        """Return the clusters, or the nodes of one; see `Client.fleet`."""
        return self._list(self._open().fleet(cluster))

    def watch(self, *topics: str, timeout: float | None = None) -> News:
        """Return the news of topics from now on: `with client.watch("leases") as news: …`.

            for event in news:
                print(event.topic, event.event, event.data)

        Topics and errors are those of `Client.watch`. The server sends all events after this call.
        A loop ends after `timeout` seconds without an event; the program may then loop again.
        """
        watch = self._run(self._open().begin_watch(*topics))
        assert self._thread is not None
        news = watching.News(self._thread, watch, timeout, self._news.discard)
        self._news.add(news)
        return news

    def manage(
        self, policy_rule_uri: str, action: str, data: JsonMapping | None = None
    ) -> JsonValue:
        """Call the `management` of a policy; see `Client.manage`."""
        return self._run(self._open().manage(policy_rule_uri, action, data))

    def call(self, message: JsonMapping, *, idempotent: bool = True) -> JsonValue:
        """Send any message of the protocol; see `Client.call`."""
        return self._run(self._open().call(message, idempotent=idempotent))

    def _list(self, listing: Listing[T]) -> list[T]:
        return self._run(listing.all())

    def _open(self) -> Client:
        if self._client is None:
            raise errors.MoorageError(
                "this client is not open; use it as `with BlockingClient() as …`"
            )
        return self._client

    def _run(self, work: Coroutine[object, object, T]) -> T:
        thread = self._thread
        if thread is None:
            work.close()
            raise errors.MoorageError("this client is not open")
        return thread.run(work)
