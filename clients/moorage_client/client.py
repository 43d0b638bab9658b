"""The async client: request placements and leases, hold leases, and query the server.

Programs with an event loop, the blocking client and the command line use it.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Final, Self

from moorage.lazy import LazyModule
from moorage.records.fields import TTL_SECONDS
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable, Sequence
    from typing import Unpack

    from moorage import model
    from moorage.model import Demand, LeaseTerms, Provision
    from moorage.protocol.replies import Event, Reply
    from moorage_client import (
        answers,
        asking,
        endpoint,
        errors,
        guard,
        holding,
        link,
        listing,
        watching,
    )
    from moorage_client.answers import Answer, Lease
    from moorage_client.asking import Request
    from moorage_client.guard import LeaseGuard
    from moorage_client.holding import HeldLease, Keeping
    from moorage_client.listing import Listing
    from moorage_client.loops import LoopThread
    from moorage_client.watching import Watch
else:  # Imported when first used: at once, they would quadruple this module's import time.
    asyncio = LazyModule("asyncio")
    model = LazyModule("moorage.model")
    answers = LazyModule("moorage_client.answers")
    asking = LazyModule("moorage_client.asking")
    endpoint = LazyModule("moorage_client.endpoint")
    errors = LazyModule("moorage_client.errors")
    guard = LazyModule("moorage_client.guard")
    holding = LazyModule("moorage_client.holding")
    link = LazyModule("moorage_client.link")
    listing = LazyModule("moorage_client.listing")
    watching = LazyModule("moorage_client.watching")

TIMEOUT_SECONDS: Final = 30.0
"""Seconds that a reply may take, in addition to the request's time in the queue."""

RECONNECT_SECONDS: Final = 30.0
"""Seconds for which the client tries to reach a lost server again."""

GIVING_BACK_MAX: Final = 256
"""Maximum late leases, granted after their caller left, to release at a time; others expire."""
GIVE_UP_SECONDS_MAX: Final = 2.0
"""Seconds that a cancelled or timed-out request may take to leave the queue."""


class Client:
    """A client of one server, or of several of which one leads. Many tasks can share it.

    Use it as a context manager, in one event loop:

        async with Client() as client:
            answer = await client.ask("first_fit:1.0-stable", resources={"gpus": 1})

    The client replaces a broken socket, and resumes its session on the new one: requests in the
    queue keep their place. It repeats lost messages, except `manage`, which is unsafe to repeat.
    A request for a lease carries an idempotency key, so its repetition returns the same lease. If a
    cancelled or timed-out request is granted later, the client releases the lease.

    Raises `SettingRefused` if the token cannot be sent in a header.

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
        renewals_on: Thread that renews leases; None starts one with the first `lease()`.
        on_lost: Called with the reason when the server does not answer and a call is repeated.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        reconnect_seconds: float = RECONNECT_SECONDS,
        ca_file: str | None = None,
        renewals_on: LoopThread | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._endpoints = endpoint.Endpoint.of_socket(url, token, ca_file)
        self._reconnect_seconds = reconnect_seconds
        self._timeout = timeout
        self._link = link.Link(self._endpoints, reconnect_seconds, on_lost)
        self._keeper = holding.Keeper(link.Link(self._endpoints, reconnect_seconds), renewals_on)
        self._giving_back: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address of the current connection; without a connection, all addresses."""
        return self._link.url

    async def __aenter__(self) -> Self:
        await self._link.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the socket and stop renewing; leases then last until their TTL."""
        if self._giving_back:
            await asyncio.wait(self._giving_back)
        await self._keeper.stop()
        await self._link.close()

    async def ask(
        self,
        policy_rule_uri: str,
        *,
        inputs: JsonValue = None,
        clusters: Sequence[str] | None = None,
        filter: JsonMapping | None = None,  # noqa: A002  # The wire's name.
        search: JsonMapping | None = None,
        parameters: JsonMapping | None = None,
        settings: JsonMapping | None = None,
        resources: Demand | JsonMapping | None = None,
        alternatives: Sequence[Demand | JsonMapping] | None = None,
        lease: LeaseTerms | JsonMapping | None = None,
        provision: Provision | JsonMapping | None = None,
        deadline_seconds: float | None = None,
        explain: bool = False,
        dry_run: bool = False,
        on_progress: Callable[[JsonMapping], None] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # The error must say what ran out.
    ) -> Answer:
        """Ask a policy for a placement, and for a lease on it if `lease` is given.

        Args:
            policy_rule_uri: The policy, `name:version-tag`, or an alias of it.
            inputs: Inputs of the policy; `{}` if it needs none.
            clusters: Ids of the clusters to choose from; default: all live ones.
            filter: Query that selects the clusters to choose from.
            search: Similarity query that selects the clusters to choose from.
            parameters: Overrides of the policy's default parameters.
            settings: Overrides of the policy's default settings.
            resources: The demand; fields and units as in `moorage.model.Demand`.
            alternatives: Acceptable demands in place of `resources`, the preferred first; the
                lease's `choice` is the number of the granted one.
            lease: Terms of the lease, as in `moorage.model.LeaseTerms`; None: only advice.
            provision: What to start on the placement, as in `moorage.model.Provision`.
            deadline_seconds: Time limit of one evaluation; default: the policy's own.
            explain: Also give the reasons.
            dry_run: Decide, but hold nothing.
            on_progress: Called in the event loop with each report of progress: the `state`; in the
                queue also the `position` and, if it is known, `expected_at`.
            timeout: Longest time for the answer in seconds, in addition to `deadline_seconds` and
                the `wait_seconds` of the lease; default: the client's.

        Raises:
            RequestRefused: The server refuses; `NoCapacity`, `NeverFits` and others give the kind.
            ConnectionFailed: The server cannot be reached, or cannot be reached again after the
                socket broke.
            Timeout: No answer in time.
        """
        message = asking.request_message(
            policy_rule_uri,
            lease,
            inputs=inputs,
            clusters=clusters,
            filter=filter,
            search=search,
            parameters=parameters,
            settings=settings,
            resources=resources,
            alternatives=alternatives,
            provision=provision,
            deadline_seconds=deadline_seconds,
            explain=explain,
            dry_run=dry_run,
        )
        answer, _ = await self._request(message, timeout, on_progress)
        return answer

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
        cancel_when_lost: bool = True,
        on_progress: Callable[[JsonMapping], None] | None = None,
        timeout: float | None = None,
        **request: Unpack[Request],
    ) -> LeaseGuard:
        """Hold a lease while a block runs: `async with client.lease(…) as held:`.

        The client requests the lease at the start, renews it every third of its TTL while the block
        runs, and releases it at the end. Renewals go on while the block blocks the event loop, but
        not during a call into C code that holds Python's global lock.

        The lease is lost if the server ends it, or if no renewal succeeds before it expires. Then
        `held.lost` becomes true, the block is cancelled at its next `await`, and the `async with`
        raises `LeaseLost`. If the block raises another error, that error is raised, with a note.

        Args:
            policy_rule_uri: The policy, `name:version-tag`.
            ttl_seconds: Seconds after which the GPUs are free if this process dies.
            wait_seconds: Longest time in the queue.
            priority: Requests with a higher priority go first.
            preemptible: Whether the lease may end early for a request of higher priority.
            idempotency_key: If an earlier request with this key got a lease, return this lease.
            ttl_seconds_min: Shortest acceptable TTL if a reservation begins earlier; 0: never
                shorten.
            cancel_when_lost: Cancel the block when the lease is lost; False only sets `held.lost`,
                for blocks that call `held.check()` themselves.
            on_progress: Called with each report of progress; see `ask`.
            timeout: Longest time for the answer in seconds; see `ask`.
            **request: The other arguments of `ask`.

        Raises:
            LeaseLost: At the end of the block: the lease is lost.
            RequestRefused: At the start of the block: the server refuses.
            ConnectionFailed: At the start: the server cannot be reached. At the end: the client
                could not release the lease, which holds its GPUs until it expires.
            Timeout: At the start or the end: no reply in time.
        """
        given = (ttl_seconds, wait_seconds, priority, preemptible, idempotency_key)
        terms = model.LeaseTerms(*given, ttl_seconds_min=ttl_seconds_min)
        message = asking.request_message(policy_rule_uri, terms, **request)
        return guard.LeaseGuard(
            lambda: self.acquire(message, timeout, on_progress),
            self._keeper.keep,
            self.hand_back,
            cancel_when_lost=cancel_when_lost,
        )

    async def acquire(
        self,
        message: JsonObject,
        seconds_max: float | None,
        on_progress: Callable[[JsonMapping], None] | None = None,
    ) -> HeldLease:
        """Ask for a lease. The context managers of `lease`, also the blocking one, call this.

        Raises:
            RuleFailed: The policy answered without a placement.
            LeaseLost: The lease ended before its answer arrived.
            MoorageError: An error of `ask`.
        """
        answer, replayed = await self._request(message, seconds_max, on_progress)
        if answer.lease is None:
            reason = f"the policy returned no placement to hold, but {str(answer.data)[:500]}"
            raise errors.RuleFailed(model.Code.POLICY_DECLINED, reason, request=answer.request)
        if answer.lease.state in holding.OVER:
            why = answer.lease.reason or "the lease ended before it was used"
            raise errors.LeaseLost(answer.lease.id, why)
        return holding.HeldLease(answer.lease, answer.data, answer.warnings, replayed=replayed)

    def keep(self, held: HeldLease, on_lost: Callable[[], None]) -> Keeping:
        """Renew a lease in the background. The blocking client's context manager calls this."""
        return self._keeper.keep(held, on_lost)

    async def hand_back(self, held: HeldLease) -> None:
        """Release a lease at the end of its block. The context managers of `lease` call this.

        Raises:
            LeaseLost: The lease had ended already.
            MoorageError: An error of `release`.
        """
        try:
            await self.release(held.id, held.token)
        except (errors.NotFound, errors.LeaseEnded) as gone:
            raise held.lose(gone.reason) from gone

    async def renew(
        self,
        lease: str,
        token: str,
        ttl_seconds: float | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # As `ask`.
    ) -> Lease:
        """Extend a lease.

        Args:
            lease: Id of the lease.
            token: Token of the lease.
            ttl_seconds: Seconds from now until the lease ends; None: the TTL of its request.
            timeout: Longest time for the reply in seconds; default: the client's.

        Raises:
            NotFound: No lease has this id.
            LeaseEnded: The lease has ended.
            Unauthorized: The token is not the lease's.
            MoorageError: An error of `ask`.
        """
        seconds = self._timeout if timeout is None else timeout
        return await link.renew(self._link, lease, token, ttl_seconds, seconds_max=seconds)

    async def release(self, lease: str, token: str | None = None) -> Lease:
        """End a lease; a second call returns the same. Errors are those of `renew`.

        Args:
            lease: Id of the lease.
            token: Token of the lease; not needed for a lease of your own tenant.
        """
        reply = await self._call({"op": "release", "lease": lease, "token": token})
        return answers.read_from(self.url, answers.read_lease, reply.lease or reply.data)

    async def flush(self, cluster: str = "") -> list[str]:
        """End your warm leases, whose released workloads still run; return their ids.

        Args:
            cluster: Only leases on this cluster; empty: on all clusters.
        """
        return answers.read_from(
            self.url, answers.read_flush, await self.call({"op": "flush", "cluster": cluster})
        )

    async def cordon(self, cluster: str, node: str = "", reason: str = "") -> JsonObject:
        """Place no new leases on a node, or on a whole cluster, until `uncordon`.

        Returns:
            `cluster_id`, `node_id`, `unavailable` (the reason) and the ids of the `leases` there.

        Raises:
            NotFound: The cluster has no such node.
            MoorageError: An error of `ask`.
        """
        message = {"op": "cordon", "cluster": cluster, "node": node, "reason": reason}
        return await self._call_for_object(message)

    async def drain(
        self, cluster: str, node: str = "", reason: str = "", *, seconds: float | None = None
    ) -> JsonObject:
        """Cordon a node or a cluster, and end or move its leases; repeat to see the remaining ones.

        Warm leases end, and leases with `on_failure: requeue` start elsewhere. All other
        leases last until they are released, or end `seconds` from now if `seconds` is given.
        """
        message = {"op": "drain", "cluster": cluster, "node": node, "reason": reason}
        return await self._call_for_object(message | {"seconds": seconds})

    async def uncordon(self, cluster: str, node: str = "") -> JsonObject:
        """Undo `cordon` or `drain` of this node, or of the whole cluster."""
        message = {"op": "uncordon", "cluster": cluster, "node": node}
        return await self._call_for_object(message)

    async def forget(self, cluster: str, node: str) -> JsonObject:
        """Remove a machine whose agent is not connected and will not come back.

        Its leases end as if their workloads had failed, and its node leaves the cluster.

        Raises:
            NotFound: No machine with an agent has this name.
            MoorageError: The machine's agent is connected; or an error of `ask`.
        """
        message = {"op": "forget", "cluster": cluster, "node": node}
        return await self._call_for_object(message)

    async def status(self, subject: str) -> JsonObject:
        """Return the lease or the waiting request with this id.

        Raises:
            NotFound: No lease and no waiting request has this id.
        """
        reply = await self._call({"op": "status", "request": subject})
        if reply.lease is not None:
            return answers.read_lease(reply.lease).document()
        return answers.read_from(self.url, answers.read_object, reply.data)

    async def why(self, subject: str, *, nodes: bool = False) -> JsonObject:
        """Return the reasons for the answer to a request; with `nodes`, what each node lacks.

        Raises:
            NotFound: The server knows no such id, or has forgotten it.
        """
        message = {"op": "why", "request": subject} | ({"nodes": True} if nodes else {})
        return await self._call_for_object(message)

    async def cancel(self, request: str) -> JsonObject:
        """Cancel a waiting request; return its last state.

        Raises:
            NotFound: No waiting request has this id.
        """
        return await self._call_for_object({"op": "cancel", "request": request})

    def leases(self, **filters: JsonValue) -> Listing[Lease]:
        """Return the leases whose fields equal the filters, e.g. `state="active"`."""
        return listing.pages(
            self.url, self.call, ("leases", "leases"), answers.read_lease, {"filters": filters}
        )

    def queue(self, **filters: JsonValue) -> Listing[JsonObject]:
        """Return the waiting requests, in the order in which they are served."""
        return listing.pages(
            self.url, self.call, ("queue", "waiting"), answers.read_object, {"filters": filters}
        )

    def fleet(self, cluster: str | None = None) -> Listing[JsonObject]:
        """Return the clusters with their totals, or the nodes of one cluster."""
        rows = "clusters" if cluster is None else "nodes"
        which: JsonObject = {} if cluster is None else {"cluster": cluster}
        return listing.pages(self.url, self.call, ("fleet", rows), answers.read_object, which)

    def watch(self, *topics: str) -> AsyncGenerator[Event, None]:
        """Return the events of topics as they come: `async for event in client.watch("policies")`.

        The watch uses a separate socket. An event `missed` says how many events a slow reader lost.

        Args:
            topics: `policies` (changed aliases, open circuits, failing examples), `leases` (your
                own) and `fleet`.

        Raises:
            RequestRefused: A topic does not exist.
            ConnectionFailed: The server cannot be reached, or the connection is lost. Events
                between that moment and the next watch are lost.
        """
        return watching.watch(self._endpoints, topics, self._reconnect_seconds)

    async def begin_watch(self, *topics: str) -> Watch:
        """Begin to watch, for `BlockingClient`; arguments and errors are those of `watch`."""
        return await watching.Watch.begin(self._endpoints, topics, self._reconnect_seconds)

    async def manage(
        self, policy_rule_uri: str, action: str, data: JsonMapping | None = None
    ) -> JsonValue:
        """Call the `management` of a policy and return its result. The call is never repeated."""
        return await self.call(
            {
                "op": "manage",
                "policy_rule_uri": policy_rule_uri,
                "action": action,
                "data": data or {},
            },
            idempotent=False,
        )

    async def call(self, message: JsonMapping, *, idempotent: bool = True) -> JsonValue:
        """Send any message of the protocol and return the `data` of its reply.

        Args:
            message: The message with its `op`, without an `id`.
            idempotent: Whether the client may send the message again if the socket breaks before
                the reply.

        Raises:
            MoorageError: An error of `ask`.
        """
        return (await self._call(message, idempotent=idempotent)).data

    async def _call_for_object(self, message: JsonMapping) -> JsonObject:
        return answers.read_from(self.url, answers.read_object, await self.call(message))

    async def _call(self, message: JsonMapping, *, idempotent: bool = True) -> Reply:
        reply, _ = await self._link.call(message, seconds_max=self._timeout, idempotent=idempotent)
        return reply

    async def _request(
        self,
        message: JsonObject,
        seconds_max: float | None,
        on_progress: Callable[[JsonMapping], None] | None,
    ) -> tuple[Answer, bool]:
        """Send a request; return the answer, and whether the answer may be older than this call."""
        seconds = self._timeout if seconds_max is None else seconds_max
        terms, deadline = message.get("lease"), message.get("deadline_seconds")
        seconds += deadline if isinstance(deadline, int | float) else 0.0
        if on_progress is not None:
            message = {**message, "stream": True}
        give_back = None
        replayed = False
        if terms is not None:
            wait = terms.get("wait_seconds")
            seconds += wait if isinstance(wait, int | float) else 0.0
            if terms.get("idempotency_key"):
                replayed = True  # A caller with its own key may ask for the lease again.
            else:
                message = {**message, "lease": {**terms, "idempotency_key": uuid.uuid4().hex}}
                give_back = self._give_back
        try:
            reply, sent = await self._link.call(
                message,
                seconds_max=seconds,
                idempotent=True,
                orphaned=give_back,
                on_progress=on_progress,
            )
        except (asyncio.CancelledError, errors.Timeout):
            if give_back is not None:
                await self._give_up(message["lease"]["idempotency_key"])
            raise
        return answers.read_answer(reply), replayed or sent > 1

    async def _give_up(self, key: str) -> None:
        """Cancel a waiting request whose caller no longer waits for the answer."""
        # If the request no longer waits, the server refuses this; its answer then arrives, and its
        # lease is given back.
        with contextlib.suppress(errors.MoorageError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_SECONDS_MAX):
                await self.call({"op": "cancel", "request": key}, idempotent=False)

    def _give_back(self, reply: Reply) -> None:
        """Release the lease of an answer whose caller no longer waits."""
        lease = reply.lease
        if lease is None or len(self._giving_back) >= GIVING_BACK_MAX:
            return
        task = asyncio.create_task(self._release_late(lease.id, lease.token))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def _release_late(self, lease: str, token: str) -> None:
        # No caller is left to get an error; if releasing fails, the lease ends with its TTL.
        with contextlib.suppress(errors.MoorageError):
            await self.release(lease, token)
