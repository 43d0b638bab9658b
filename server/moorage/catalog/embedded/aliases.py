"""Aliases of policies: names such as `name:stable` that point at a version.

An alias is one record of the catalog's file, so a change is durable as a whole or not at all.
`catalog.embedded.memory` resolves aliases, `daemon.publishing.aliases` changes them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from moorage.catalog.embedded.store import Database, DocumentStore, StoredRow
from moorage.core.state.refusals import nearest_or_known
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject

HISTORY_MAX: Final = 1000
"""Maximum stored changes of one alias; the oldest is forgotten first."""
DEFAULT_NAME: Final = "stable"
"""The word after the colon if a policy name has none: `NAME` means `NAME:stable`."""
_ALIAS: Final = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<word>[A-Za-z0-9_.+]+))?")
"""Matches an alias: no dash after the colon, so that no alias looks like a version's URI."""
_CHARS_MAX: Final = 255
_EXPECTED: Final = "`<name>:<word>`, the word without a dash, e.g. `ip_allowlist:stable`; or a name"

What = Literal[
    "activated",
    "rolled_back",
    "fell_back",
    "canary_started",
    "canary_ended",
    "shadow_started",
    "shadow_ended",
]
Standing = Literal["good", "untried", "failing"]
"""The result of a version's active time: answered well, had no requests, or failed."""


class AliasChange(Struct, frozen=True, omit_defaults=True):
    """One change of an alias.

    Args:
        at: Seconds since the epoch.
        who: The tenant, or `moored` if the server itself made the change.
        version: URI of the version that the change is about, e.g. the newly active one.
        former: The formerly active version, if this change replaced it.
        former_standing: Result of the former version's active time.
        former_digest: Digest of the former version, since its URI may later get other content.
        reason: The server's reason, if the server itself made the change.
    """

    at: float
    who: str
    what: What
    version: str
    former: str = ""
    former_standing: Standing | Literal[""] = ""
    former_digest: str = ""
    reason: str = ""


class Former(NamedTuple):
    """A version that was active once, and the digest of its content at that time, if known."""

    version: str
    digest: str

    def is_still(self, digest: str) -> bool:
        """Return whether the URI still has the same content, given its present digest."""
        return not self.digest or self.digest == digest


class Canary(Struct, frozen=True):
    """A canary: the version that gets a share of the requests, and the share.

    Args:
        percent: Percentage of requests, above 0, at most 100.
        by: Unit of the draw: each `request` (by idempotency key), or all requests of a
            `tenant`.
        seed: Seed of the draw; another seed selects other requests.
    """

    version: str
    percent: Annotated[float, Meta(gt=0, le=100)]
    by: Literal["request", "tenant"] = "request"
    seed: int = 0


class Alias(Struct, frozen=True, omit_defaults=True):
    """A stored alias.

    Args:
        name: The alias's name, in the form `name:word`.
        version: URI of the active version.
        canary: The candidate that gets a share of the requests.
        shadow: URI of a candidate that is evaluated beside the active version, without effect.
        history: All changes, the latest last.
        owner: The tenant that created the alias; empty: unknown.
    """

    name: str
    version: str
    canary: Canary | None = None
    shadow: str = ""
    history: tuple[AliasChange, ...] = ()
    owner: str = ""

    def is_owned_by(self, who: str) -> bool:
        """Return whether a tenant made the alias, and so may see all its requests."""
        return self.owner == who

    @property
    def shadow_owner(self) -> str:
        """The tenant that started the last shadow; empty if there was none."""
        changes = (each for each in reversed(self.history) if each.what == "shadow_started")
        return next((each.who for each in changes), "")

    @property
    def former(self) -> str:
        """The version that was active before the present one; empty if there was none."""
        return self._former.version

    @property
    def former_digest(self) -> str:
        """The digest of `former` when it was active."""
        return self._former.digest

    @property
    def _former(self) -> "Former":
        latest = next((change for change in reversed(self.history) if change.former), None)
        return Former(latest.former, latest.former_digest) if latest else Former("", "")

    @property
    def versions(self) -> frozenset[str]:
        """All versions to which the alias sends requests."""
        named = (self.version, self.canary.version if self.canary else "", self.shadow)
        return frozenset(each for each in named if each)

    def fallbacks(self) -> list["Former"]:
        """Return formerly active versions, the best fallback first.

        Versions that last answered well come before versions without requests, and later versions
        before earlier versions; versions that failed when they were replaced are left out.
        """
        last: dict[str, tuple[Former, Standing]] = {}
        for change in self.history:
            if change.former and change.former_standing:
                former = Former(change.former, change.former_digest)
                standing = change.former_standing
                known = last.pop(change.former, None)
                if standing == "untried" and known is not None and known[0] == former:
                    standing = known[1]
                last[change.former] = former, standing
        last.pop(self.version, None)
        latest = list(reversed(last.values()))
        return [
            former
            for standing in ("good", "untried")
            for former, found in latest
            if found == standing
        ]

    def replace(self, change: AliasChange, **fields: object) -> "Alias":
        """Return the alias with changed fields, and with this change in its history."""
        return replace(self, **fields, history=(*self.history, change)[-HISTORY_MAX:])

    def document(self) -> JsonObject:
        """Return the alias as a document for clients."""
        latest = next((c for c in reversed(self.history) if c.version == self.version), None)
        return {
            "alias": self.name,
            "owner": self.owner or None,
            "policy_rule_uri": self.version,
            "former": self.former or None,
            "at": latest.at if latest else None,
            "who": latest.who if latest else None,
            "canary": msgspec.to_builtins(self.canary),
            "shadow": self.shadow or None,
            "history": [msgspec.to_builtins(each) for each in self.history],
        }


def alias_name(given: str) -> str:
    """Return the full name of an alias; a bare policy name means its alias `stable`.

    Raises:
        ServiceError: `bad_message`: the text cannot be an alias.
    """
    found = _ALIAS.fullmatch(given) if len(given) <= _CHARS_MAX else None
    if found is None:
        raise ServiceError.wrong_field("alias", _EXPECTED)
    return f"{found['name']}:{found['word'] or DEFAULT_NAME}"


def name_of(uri: str) -> str:
    """Return the policy's name in a URI or an alias."""
    return uri.partition(":")[0]


class Aliases:
    """All aliases, in memory and in the catalog's file. Only the event loop may read them."""

    def __init__(self, store: DocumentStore) -> None:
        self._store = store
        self._by_name: dict[str, Alias] = {}
        self._meanings: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, given: str) -> bool:
        """Return whether `given` is an alias, or a policy name that has the alias `stable`."""
        return given in self._meanings

    def take_over(self, aliases: list[Alias], gone: Iterable[str] = ()) -> None:
        """Apply added, changed and removed (`gone`) records of the file."""
        for name in gone:
            self._drop(self._by_name[name])
        for alias in aliases:
            self._keep(alias)

    def meaning(self, given: str) -> str:
        """Return the version of an alias or a bare name; return any other text unchanged."""
        return self._meanings.get(given, given)

    def find(self, given: str) -> Alias | None:
        """Return an alias by its name, or by a bare policy name."""
        return self._by_name.get(given) or self._by_name.get(f"{given}:{DEFAULT_NAME}")

    def all(self) -> list[Alias]:
        """Return all aliases, sorted by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def using(self, uri: str) -> list[str]:
        """Return the aliases that send requests to a version."""
        return [alias.name for alias in self.all() if uri in alias.versions]

    async def change(self, name: str, change: Callable[[Alias | None], Alias]) -> Alias:
        """Change an alias; return it when the change is durable and in effect.

        Args:
            name: The result of `alias_name`.
            change: Takes the present alias, or None, and returns the new one. `change` runs in the
                store's thread, one change at a time; an error leaves the alias unchanged.

        Raises:
            ServiceError: The error of `change`, or `too_large`, `busy`, `unavailable`.
        """

        def work(database: Database) -> Alias:
            row = database.get("alias", name)
            new = change(read_alias(row) if row else None)
            database.put("alias", StoredRow(name, msgspec.json.encode(new)))
            return new

        return await self._store.run(work, self._keep)

    async def delete(self, name: str) -> Alias:
        """Delete an alias; return its last state, or raise `not_found`."""

        def work(database: Database) -> Alias:
            row = database.get("alias", name)
            if row is None:
                raise unknown_alias(name, self._by_name)
            database.remove("alias", name)
            return read_alias(row)

        return await self._store.run(work, self._drop)

    def _keep(self, alias: Alias) -> None:
        self._by_name[alias.name] = alias
        for meaning in _readings(alias):
            self._meanings[meaning] = alias.version

    def _drop(self, alias: Alias) -> None:
        self._by_name.pop(alias.name, None)
        for meaning in _readings(alias):
            self._meanings.pop(meaning, None)


def _readings(alias: Alias) -> Mapping[str, None]:
    """Return all names that a request may use for an alias."""
    name, _, tag = alias.name.partition(":")
    return dict.fromkeys([alias.name, name] if tag == DEFAULT_NAME else [alias.name])


def read_alias(row: StoredRow) -> Alias:
    """Return the alias of a stored record."""
    return msgspec.json.decode(row.document, type=Alias)


def unknown_alias(name: str, known: Iterable[str]) -> ServiceError:
    """Return the refusal of an unknown alias, with the nearest existing names."""
    return ServiceError(
        Code.NOT_FOUND,
        f"alias: there is no {name}{nearest_or_known(name, known)};"
        f" activate a version of {name_of(name)} to create it",
        field="alias",
        expected="an alias that exists",
    )
