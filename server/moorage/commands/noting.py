"""Records the changes of commands in the audit log, with the command's user."""

import os
import time
from contextlib import closing

import typer

from moorage.config.settings import Config
from moorage.launch import reason_of
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject
from moorage.records.rights import Role
from moorage.storage.base import StorageError
from moorage.storage.opening import open_storage


def note(
    settings: Config,
    what: str,
    about: JsonObject,
    after: JsonObject | None = None,
    before: JsonObject | None = None,
) -> None:
    """Record a command's change in the audit log, unless the log is off.

    A damaged log must not prevent a revocation, nor hide a token that is valid now: the command
    goes on, with a message on stderr.
    """
    if not settings.audit_days:
        return
    from moorage.daemon.access.audit_log import open_lines  # noqa: PLC0415  # As in serve.

    now, user = time.time(), f"uid {os.getuid()}"
    entry = AuditEntry(now, what, user, Role.ADMIN, "", "local", about, before, after)
    folder = settings.data_dir
    try:
        rows = open_storage(settings.storage, folder).audit()
        bounds = settings.audit_days, settings.audit_mib_max
        with closing(open_lines(folder, *bounds, rows)) as lines:
            lines.append([entry], now)
    except (OSError, ValueError, StorageError) as error:
        reason = f"the audit log has no entry {what} of this change: {reason_of(error)}"
        typer.echo(f"moored: {reason}", err=True)
