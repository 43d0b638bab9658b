"""Remembers the settings' tokens, so that the audit log has changes made while no server ran.

The file in the data folder has no token, and no digest of one: people choose these tokens, and a
reader of a digest can try guesses. A tag of 16 bits tells two tokens apart, but it confirms no
guess: thousands of guesses have the same tag.
"""

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog

from moorage.daemon.access.audit_log import AuditLog
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject
from moorage.storage.sqlite.files import read_file, write_durably

FILE: Final = "tokens.seen"
"""Name of the file in the data folder."""
_TAG_BYTES: Final = 2
_KEY_BYTES: Final = 16

log = structlog.get_logger("moored")


class _Seen(msgspec.Struct, frozen=True):
    """The content of the file.

    Args:
        key: The key of the tags. It stays, since each further key would tell more of a token.
        tags: The tenant and the tag of each token.
    """

    key: Annotated[bytes, msgspec.Meta(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]
    tags: list[tuple[str, str]]


class SeenTokens:
    """The tokens of the settings, as this server last saw them in its data folder.

    Args:
        folder: The data folder.
        audit: Gets the entry of a change.
    """

    def __init__(self, folder: Path, audit: AuditLog) -> None:
        self._path = folder / FILE
        self._audit = audit
        self._seen: _Seen | None = None
        """What the file has; None: the file is missing or damaged."""

    async def compare(self, tokens: Mapping[str, str]) -> None:
        """Note which tenants' tokens were added or removed since the last run, and remember.

        An entry `tokens.seen_lost` says that the file was damaged: these changes are unknown.

        Args:
            tokens: The tenant of each token, at the server's start.
        """
        try:
            self._seen = msgspec.json.decode(read_file(self._path), type=_Seen)
        except FileNotFoundError:  # The first server of this folder has nothing to compare with.
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("tokens_not_remembered", reason=f"{self._path}: {error}")
            self._audit.note(AuditEntry(time.time(), "tokens.seen_lost", "moored"))
        else:
            now, before = set(_tags(tokens, self._seen.key)), set(self._seen.tags)
            if now != before:
                self.note(_tenants(now - before), _tenants(before - now))
        await self.remember(tokens)

    def note(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """Note a change, with the tenants of added and of removed tokens."""
        about: JsonObject = {"added_for": [*added], "removed_for": [*removed]}
        self._audit.note(AuditEntry(time.time(), "tokens.changed", "moored", about=about))

    async def remember(self, tokens: Mapping[str, str]) -> None:
        """Store what the next start compares, once the audit log has the entry of a change."""
        await self._audit.flush()
        key = secrets.token_bytes(_KEY_BYTES) if self._seen is None else self._seen.key
        latest = _Seen(key, _tags(tokens, key))
        if latest != self._seen:
            try:
                write_durably(self._path, msgspec.json.encode(latest))
                self._seen = latest
            except OSError as error:  # The next start then notes this change once more.
                log.warning("tokens_not_remembered", reason=str(error))


def _tags(tokens: Mapping[str, str], key: bytes) -> list[tuple[str, str]]:
    """Return the tenant and the tag of each token."""
    return sorted(
        (tenant, hashlib.blake2b(token.encode(), key=key, digest_size=_TAG_BYTES).hexdigest())
        for token, tenant in tokens.items()
    )


def _tenants(tags: Iterable[tuple[str, str]]) -> list[str]:
    return sorted(tenant for tenant, _ in tags)
