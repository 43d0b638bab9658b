"""Agents and their joining tokens, in the data folder: `moored agent` writes them, too.

Only digests of tokens and keys are stored.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from moorage.backends.agents.backend import Place
from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.access.shared_file import SharedFile
from moorage.model import ClusterId, NodeId

__all__ = ["USED", "AgentRecord", "AgentStore", "AgentStoreError", "JoiningToken"]

AGENTS_FILE: Final = "agents.db"
"""In the data folder; `moored agent token` makes it."""
TOKEN_PREFIX: Final = "moor_join_"  # noqa: S105  # By it, scanners for leaked secrets know a token.
KEY_PREFIX: Final = "moor_agent_"
_SECRET_BYTES: Final = 24
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS tokens (
    digest TEXT PRIMARY KEY,
    cluster_id TEXT NOT NULL,
    expires_at REAL NOT NULL,
    agent TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE IF NOT EXISTS agents (
    cluster_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    digest TEXT NOT NULL UNIQUE,
    joined_at REAL NOT NULL,
    connected INTEGER NOT NULL DEFAULT 0,
    changed_at REAL NOT NULL,
    address TEXT NOT NULL DEFAULT '',
    release TEXT NOT NULL DEFAULT '',
    revoked INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (cluster_id, node_id)
) STRICT;
"""


USED: Final = (
    "this joining token was used by another agent; `moored agent token` makes one for each machine"
)


class AgentStoreError(Exception):
    """The store of agents cannot be used, or refuses a change; the text says what to do."""


class JoiningToken(msgspec.Struct, frozen=True):
    """Lets one new agent in.

    Args:
        digest: SHA-256 of the token, in hexadecimal.
        cluster_id: The cluster that its machine joins.
        expires_at: In seconds since the epoch.
        agent: Id of the agent that used it; empty: none has.

    """

    digest: str
    cluster_id: str
    expires_at: float
    agent: str


class AgentRecord(msgspec.Struct, frozen=True):
    """An agent that has joined.

    Args:
        cluster_id: The cluster of its machine.
        node_id: The node that it is there.
        agent: Its own id, made once.
        digest: SHA-256 of its key, in hexadecimal.
        joined_at: In seconds since the epoch.
        connected: Whether it is.
        changed_at: Since when, likewise.
        address: Where it last came from.
        release: Of its program.
        revoked: Whether its key is refused.

    """

    cluster_id: str
    node_id: str
    agent: str
    digest: str
    joined_at: float
    connected: bool
    changed_at: float
    address: str
    release: str
    revoked: bool

    @property
    def place(self) -> Place:
        """Its node."""
        return ClusterId(self.cluster_id), NodeId(self.node_id)

    @property
    def name(self) -> str:
        """What commands call it."""
        return f"{self.cluster_id}/{self.node_id}"


class AgentStore:
    """Agents of one server.

    Args:
        folder: Its data folder.

    """

    def __init__(self, folder: Path) -> None:
        self._file = SharedFile(folder / AGENTS_FILE, _TABLES, AgentStoreError)
        self._tokens: dict[str, JoiningToken] = {}
        self._agents: dict[Place, AgentRecord] = {}

    def agents(self) -> Mapping[Place, AgentRecord]:
        """Return all agents, with revoked ones.

        Raises:
            AgentStoreError: The file cannot be read.

        """
        with self._file.reading() as connection:
            if connection is not None:
                rows = connection.execute("SELECT * FROM agents ORDER BY cluster_id, node_id")
                found = [msgspec.convert(dict(row), AgentRecord, strict=False) for row in rows]
                self._agents = {each.place: each for each in found}
                rows = connection.execute("SELECT * FROM tokens")
                tokens = [msgspec.convert(dict(row), JoiningToken) for row in rows]
                self._tokens = {each.digest: each for each in tokens}
        return self._agents

    def find(self, secret: str, now: float) -> AgentRecord | JoiningToken | None:
        """Return whose key this is, or the joining token; None: it lets nothing in.

        Raises:
            AgentStoreError: The file cannot be read.

        """
        agents, shown = self.agents(), digest(secret)
        if secret.startswith(KEY_PREFIX):
            return next((a for a in agents.values() if a.digest == shown and not a.revoked), None)
        token = self._tokens.get(shown)
        return None if token is None or token.expires_at <= now else token

    def create_token(self, cluster_id: str, now: float, expires_at: float) -> str:
        """Store a new joining token and return it; forget those that have expired.

        Raises:
            AgentStoreError: The file cannot be written.

        """
        token = TOKEN_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        with self._file.writing() as connection:
            connection.execute("DELETE FROM tokens WHERE expires_at <= ?", (now,))
            connection.execute(
                "INSERT INTO tokens (digest, cluster_id, expires_at) VALUES (?, ?, ?)",
                (digest(token), cluster_id, expires_at),
            )
        return token

    def join(self, token: JoiningToken, place: Place, agent: str, now: float) -> str:
        """Note that an agent has used its token; return its key.

        Raises:
            AgentStoreError: Another one used the token, or the file cannot be written.

        """
        key = KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        with self._file.writing() as connection:
            used = connection.execute(
                "UPDATE tokens SET agent = ? WHERE digest = ? AND agent IN ('', ?)",
                (agent, token.digest, agent),
            )
            if not used.rowcount:
                raise AgentStoreError(USED)
            connection.execute(
                "INSERT OR REPLACE INTO agents"
                " (cluster_id, node_id, agent, digest, joined_at, changed_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (*place, agent, digest(key), now, now),
            )
        return key

    def note_connection(self, place: Place, address: str, release: str, now: float) -> None:
        """Note that an agent is connected."""
        with self._file.writing() as connection:
            connection.execute(
                "UPDATE agents SET connected = 1, changed_at = ?, address = ?, release = ?"
                " WHERE cluster_id = ? AND node_id = ?",
                (now, address, release, *place),
            )

    def note_disconnection(self, place: Place | None, now: float) -> None:
        """Note that an agent, or every one, is not connected."""
        with self._file.writing() as connection:
            connection.execute(
                "UPDATE agents SET connected = 0, changed_at = ? WHERE connected"
                " AND (?2 IS NULL OR (cluster_id, node_id) = (?2, ?3))",
                (now, *(place or (None, None))),
            )

    def revoke(self, name: str) -> AgentRecord:
        """Refuse the key of an agent from now on.

        Raises:
            AgentStoreError: There is no such agent, or the file cannot be written.

        """
        found = self._named(name)
        with self._file.writing() as connection:
            connection.execute("DELETE FROM tokens WHERE agent = ?", (found.agent,))
            connection.execute(
                "UPDATE agents SET revoked = 1 WHERE cluster_id = ? AND node_id = ?", found.place
            )
        return found

    def forget(self, name: str) -> AgentRecord:
        """Remove an agent that will not come back.

        Raises:
            AgentStoreError: There is no such agent, it is connected, or the file cannot be written.

        """
        found = self._named(name)
        if found.connected:
            reason = f"{name} is connected, and what its leases run there would run on"
            raise AgentStoreError(
                f"{reason}; drain it (`moorage fleet drain`), end its agent first"
            )
        with self._file.writing() as connection:
            connection.execute("DELETE FROM tokens WHERE agent = ?", (found.agent,))
            connection.execute(
                "DELETE FROM agents WHERE cluster_id = ? AND node_id = ?", found.place
            )
        return found

    def _named(self, name: str) -> AgentRecord:
        for each in self.agents().values():
            if each.name == name:
                return each
        raise AgentStoreError(f"no agent is named {name}; `moored agent list` shows all")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
