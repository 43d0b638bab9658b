"""Stores agents and their joining tokens; `moored agent` writes them, too.

Only digests of tokens and keys are stored.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, TypeVar

import msgspec

from moorage.backends.agents.backend import Place
from moorage.backends.agents.wire import AgentFolder
from moorage.daemon.access.lease_tokens import digest
from moorage.model import ClusterId, NodeId
from moorage.storage.base import AgentRows, StorageError, diff_rows

TOKEN_PREFIX: Final = "moor_join_"  # noqa: S105  # By it, scanners for leaked secrets know a token.
KEY_PREFIX: Final = "moor_agent_"
_SECRET_BYTES: Final = 24
_SEPARATOR: Final = "\n"
"""Separates the parts of keys: no name of a cluster or node contains it."""
T = TypeVar("T")
USED: Final = (
    "this joining token was used by another agent; `moored agent token` makes one for each machine"
)


class AgentStoreError(Exception):
    """The store of agents cannot be used, or refuses a change; the text says what to do."""


class JoiningToken(msgspec.Struct, frozen=True):
    """A token with which one new agent may join.

    Args:
        digest: SHA-256 of the token, in hexadecimal.
        cluster_id: The cluster that the agent's machine joins.
        expires_at: The end of the token, in seconds since the epoch.
        agent: Id of the agent that used it; empty: the token is unused.
    """

    digest: str
    cluster_id: str
    expires_at: float
    agent: str = ""


class AgentOrigin(NamedTuple):
    """What an agent's connection shows of the agent; for the fields, see `AgentRecord`."""

    address: str
    release: str
    unheard_seconds: float
    changed_at: float
    folder: AgentFolder | None = None


class AgentRecord(msgspec.Struct, frozen=True):
    """An agent that has joined, is joining, or was forgotten.

    Args:
        cluster_id: The cluster that its machine belongs to.
        node_id: The node that the machine is in this cluster.
        agent: Id of the agent, which never changes.
        digest: SHA-256 of its key, in hexadecimal.
        joined_at: The time at which it joined, in seconds since the epoch.
        changed_at: The time at which it last connected or disconnected, in seconds since the epoch.
        connected: Whether the agent is connected.
        address: The address from which the agent last connected.
        unheard_seconds: How long its workloads run without a connection; 0: no limit.
        revoked: Whether its key is refused.
        forgotten: Whether the server must remove its node, and then this record: the agent was
            forgotten, or did not finish joining. After a crash, the record still shows this.
        folder: Its data folder, at its last connection; None: unknown.
    """

    cluster_id: str
    node_id: str
    agent: str
    digest: str
    joined_at: float
    changed_at: float
    connected: bool = False
    address: str = ""
    release: str = ""
    unheard_seconds: float = 0.0
    revoked: bool = False
    forgotten: bool = False
    folder: AgentFolder | None = None

    @property
    def place(self) -> Place:
        """Cluster and node of its machine."""
        return ClusterId(self.cluster_id), NodeId(self.node_id)

    @property
    def name(self) -> str:
        """The agent's name in commands: cluster and node."""
        return f"{self.cluster_id}/{self.node_id}"


class Reclaim(msgspec.Struct, frozen=True):
    """An operator's order that agents follow this server, whichever server they followed before.

    Args:
        epoch: A number that is added to the epoch of each server on this storage.
    """

    epoch: int


AnyRecord = AgentRecord | JoiningToken | Reclaim
_KINDS: Final[dict[str, type[AnyRecord]]] = {
    each.__name__: each for each in (AgentRecord, JoiningToken, Reclaim)
}


class AgentStore:
    """Agents of one server."""

    def __init__(self, rows: AgentRows) -> None:
        self._rows = rows
        self._version: object = None
        self._documents: Mapping[str, bytes] = {}
        self._records: dict[str, AnyRecord] = {}
        self._agents: dict[Place, AgentRecord] = {}
        self._forgotten: frozenset[Place] = frozenset()
        self._by_digest: dict[str, AgentRecord] = {}
        self._transaction: dict[str, bytes] | None = None

    def agents(self) -> Mapping[Place, AgentRecord]:
        """Return all agents, including revoked ones.

        Raises:
            AgentStoreError: The stored rows cannot be read.
        """
        with self._errors():
            version = self._rows.version()
            if version != self._version:
                self._read_changes(self._rows.rows())
                self._version = version
        return self._agents

    def forgotten(self) -> AbstractSet[Place]:
        """Return the places of forgotten agents whose node may still be in its cluster.

        Raises:
            AgentStoreError: The stored rows cannot be read.
        """
        self.agents()
        return self._forgotten

    def _read_changes(self, documents: Mapping[str, bytes]) -> None:
        """Decode only changed documents: each of a thousand joining machines changes one."""
        put, gone = diff_rows(self._documents, documents)
        for (key,) in gone:
            self._records.pop(key, None)
        for key, document in put:
            kind = _KINDS.get(key.partition(_SEPARATOR)[0])
            if kind is not None:  # A later release may store other kinds.
                self._records[key] = msgspec.json.decode(document, type=kind)
        self._documents = documents
        known = [each for each in self._records.values() if isinstance(each, AgentRecord)]
        agents = [each for each in known if not each.forgotten]
        self._agents = {each.place: each for each in agents}
        self._forgotten = frozenset(each.place for each in known if each.forgotten)
        self._by_digest = {each.digest: each for each in agents if not each.revoked}

    def has_changed(self) -> bool:
        """Return whether there may be a change that `agents` has not read."""
        try:
            return self._rows.version() != self._version
        except StorageError:
            return True

    def reclaimed(self) -> int:
        """Return the increment of the server's epoch; see `Reclaim`.

        Raises:
            AgentStoreError: The stored row cannot be read.
        """
        self.agents()
        known = self._records.get(_key(Reclaim(0)))
        return known.epoch if isinstance(known, Reclaim) else 0

    def find(self, secret: str, now: float) -> AgentRecord | JoiningToken | None:
        """Return the agent with this key, or this joining token; None: the secret is neither.

        Raises:
            AgentStoreError: The stored rows cannot be read.
        """
        self.agents()
        shown = digest(secret)
        if secret.startswith(KEY_PREFIX):
            return self._by_digest.get(shown)
        token = self._records.get(_key(JoiningToken(shown, "", 0.0)))
        return token if isinstance(token, JoiningToken) and token.expires_at > now else None

    def create_token(self, cluster_id: str, now: float, expires_at: float) -> str:
        """Store a new joining token and return it; forget those that have expired.

        Raises:
            AgentStoreError: The change cannot be stored.
        """
        token = TOKEN_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        with self._change() as documents:
            for each in _read(documents, JoiningToken):
                if each.expires_at <= now:
                    del documents[_key(each)]
            _put(documents, JoiningToken(digest(token), cluster_id, expires_at))
        return token

    def note_joining(self, place: Place, now: float) -> None:
        """Record a joining agent as forgotten: if the joining fails, the server removes its node.

        Raises:
            AgentStoreError: The change cannot be stored.
        """
        with self._change() as documents:
            _put(documents, AgentRecord(*place, "", "", now, now, forgotten=True))

    def erase(self, place: Place) -> None:
        """Remove the record of a forgotten agent, whose node has left its cluster.

        Raises:
            AgentStoreError: The change cannot be stored.
        """
        with self._change() as documents:
            found = _get(documents, AgentRecord, *place)
            if found is not None and found.forgotten:
                del documents[_key(found)]

    def join(self, token: JoiningToken, place: Place, agent: str, shown: AgentOrigin) -> str:
        """Note that an agent has used its token, and is connected; return its key.

        Raises:
            AgentStoreError: Another agent used the token, or the agent cannot be stored.
        """
        key = KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        with self._change() as documents:
            found = _get(documents, JoiningToken, token.digest)
            if found is None or found.agent not in {"", agent}:
                raise AgentStoreError(USED)
            _put(documents, msgspec.structs.replace(found, agent=agent))
            joined_at, about = shown.changed_at, shown._asdict()
            own = AgentRecord(*place, agent, digest(key), joined_at, connected=True, **about)
            _put(documents, own)
        return key

    def note_connection(self, place: Place, shown: AgentOrigin) -> None:
        """Note that an agent is connected.

        Raises:
            AgentStoreError: The change cannot be stored.
        """
        with self._change() as documents:
            found = _get(documents, AgentRecord, *place)
            if found is not None:
                # An older agent sends no `folder`: the stored one stays, to detect copies later.
                about = shown._replace(folder=shown.folder or found.folder)._asdict()
                _put(documents, msgspec.structs.replace(found, connected=True, **about))

    def note_disconnection(self, connection: tuple[Place, float] | None, now: float) -> None:
        """Record that one connection, or every one, has ended.

        Args:
            connection: Machine and `changed_at` of the connection. A later connection of the
                machine is left: it may be to this server's successor. None: every connection.
            now: The time, in seconds since the epoch.

        Raises:
            AgentStoreError: The change cannot be stored.
        """
        with self._change() as documents:
            for each in _read(documents, AgentRecord):
                if each.connected and connection in {None, (each.place, each.changed_at)}:
                    _put(documents, msgspec.structs.replace(each, connected=False, changed_at=now))

    def reclaim(self, now: float) -> int:
        """Make agents follow this server again, even after a higher epoch; return the increment.

        The increment grows with the time. Epochs grow only when the leader changes, and so more
        slowly.

        Raises:
            AgentStoreError: The change cannot be stored.
        """
        with self._change() as documents:
            known = max((each.epoch for each in _read(documents, Reclaim)), default=0)
            again = Reclaim(max(known + 1, int(now)))
            _put(documents, again)
        return again.epoch

    def revoke(self, name: str) -> AgentRecord:
        """Refuse the key of an agent from now on.

        Raises:
            AgentStoreError: No agent has this name, or the revocation cannot be stored.
        """
        with self._change() as documents:
            found = _take(documents, name)
            _put(documents, msgspec.structs.replace(found, revoked=True))
        return found

    def forget(self, name: str) -> AgentRecord:
        """Record that an agent will not come back.

        Raises:
            AgentStoreError: No agent has this name, the agent is connected, or the change cannot be
                stored.
        """
        with self._change() as documents:
            found = _take(documents, name)
            if found.connected:
                raise AgentStoreError(
                    f"{name} is connected, so the workloads of its leases would run on; "
                    "first drain it (`moorage fleet drain`) and end its agent"
                )
            _put(documents, msgspec.structs.replace(found, forgotten=True))
        return found

    def close(self) -> None:
        """Close the store."""
        self._rows.close()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Commit the changes in a `with` block in one transaction, except changes that fail.

        Raises:
            AgentStoreError: The transaction cannot be stored.
        """
        with self._errors(), self._rows.change() as self._transaction:
            try:
                yield
            finally:
                self._transaction = None

    @contextlib.contextmanager
    def _change(self) -> Iterator[dict[str, bytes]]:
        if self._transaction is None:
            with self._errors(), self._rows.change() as documents:
                yield documents
            return
        with self._errors():
            documents = dict(self._transaction)
            yield documents
        for key in self._transaction.keys() - documents.keys():
            del self._transaction[key]
        self._transaction.update(documents)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise AgentStoreError(str(error)) from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise AgentStoreError(f"{self._rows.place}: {error}") from error


def _key(record: AnyRecord) -> str:
    if isinstance(record, Reclaim):
        return _SEPARATOR.join(("Reclaim", ""))
    if isinstance(record, AgentRecord):
        return _SEPARATOR.join(("AgentRecord", *record.place))
    return _SEPARATOR.join(("JoiningToken", record.digest))


def _put(documents: dict[str, bytes], record: AnyRecord) -> None:
    documents[_key(record)] = msgspec.json.encode(record)


def _get(documents: Mapping[str, bytes], kind: type[T], *names: str) -> T | None:
    found = documents.get(_SEPARATOR.join((kind.__name__, *names)))
    return None if found is None else msgspec.json.decode(found, type=kind)


def _read(documents: Mapping[str, bytes], kind: type[T]) -> list[T]:
    prefix = kind.__name__ + _SEPARATOR
    return [
        msgspec.json.decode(document, type=kind)
        for key, document in documents.items()
        if key.startswith(prefix)
    ]


def _take(documents: dict[str, bytes], name: str) -> AgentRecord:
    """Remove an agent and the tokens that it used; return it."""
    for found in _read(documents, AgentRecord):
        if found.name == name and not found.forgotten:
            del documents[_key(found)]
            for each in _read(documents, JoiningToken):
                if each.agent == found.agent:
                    del documents[_key(each)]
            return found
    raise AgentStoreError(f"no agent is named {name}; `moored agent list` shows all")
