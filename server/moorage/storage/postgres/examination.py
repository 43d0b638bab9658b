"""Finds, for `moored doctor`, faults that make a database unfit as a server's storage."""

import time
from contextlib import closing
from typing import Final

from moorage.records.findings import DoctorFinding
from moorage.storage.base import StorageError
from moorage.storage.postgres.connection import Connection, connect, place_of, translate_errors
from moorage.storage.postgres.leadership import FORMAT, SQL, check_server

CLOCK_SECONDS_MAX: Final = 1.0
"""Largest permitted difference between the clocks of the database and this machine."""
_LOSES: Final = {"off", "local"}


def examine(address: str) -> list[DoctorFinding]:
    """Return the findings about a database; errors of the database are findings, too."""
    try:
        with closing(connect(address, "doctor")) as connection, translate_errors(place_of(address)):
            check_server(connection, place_of(address))
            return _findings(connection)
    except StorageError as error:
        return [DoctorFinding("storage", "broken", str(error))]


def _findings(connection: Connection) -> list[DoctorFinding]:
    began = time.time()
    settings = {str(name): str(value) for name, value in connection.execute(SQL["settings"])}
    clock = connection.execute(SQL["clock"]).fetchone()
    exists = connection.execute(SQL["exists"]).fetchone()
    assert clock is not None
    assert exists is not None
    findings = [DoctorFinding("storage", "ok", f"PostgreSQL {settings['server_version']}")]
    if any(exists):
        findings += _tables(connection) if exists[0] else []
    else:
        reason = "no tables, and this role may not create them: run `moored storage prepare`"
        findings.append(DoctorFinding("storage: tables", "broken", reason))
    if settings["default_transaction_read_only"] == "on":
        reason = "`default_transaction_read_only` is on: nothing can be written"
        findings.append(DoctorFinding("storage: read only", "broken", reason))
    for name in ("fsync", "full_page_writes"):
        if settings[name] == "off":
            reason = f"`{name}` is off: a power cut loses acknowledged changes"
            findings.append(DoctorFinding(f"storage: {name}", "missing", reason))
    standbys = settings["synchronous_standby_names"]
    if settings["synchronous_commit"] in _LOSES and standbys:
        reason = f"the setting is {settings['synchronous_commit']}: commits wait for no standby"
        findings.append(DoctorFinding("storage: synchronous_commit", "missing", reason))
    if not standbys:
        reason = (
            "no synchronous standby: the loss of the database's machine loses acknowledged changes"
        )
        findings.append(DoctorFinding("storage: standby", "missing", reason))
    apart = abs(float(clock[0]) - began)
    if apart > CLOCK_SECONDS_MAX:
        reason = f"the database's clock and this machine's are {apart:.1f} s apart"
        findings.append(DoctorFinding("storage: clock", "missing", reason))
    return findings


def _tables(connection: Connection) -> list[DoctorFinding]:
    granted = connection.execute(SQL["use_grants"]).fetchone()
    if granted is None or not all(granted):
        reason = "this role may not write them: run `moored storage prepare --for ROLE`"
        return [DoctorFinding("storage: tables", "broken", reason)]
    number, writer = connection.execute(SQL["format"]).fetchone(), connection.execute(SQL["writer"])
    assert number is not None
    copying = connection.execute(SQL["copying"]).fetchone()
    if copying is not None and copying[0]:
        reason = "an unfinished copy: run `moored storage copy` again"
        return [DoctorFinding("storage: tables", "broken", reason)]
    refusal = FORMAT.refusal(int(number[0]), str(next(writer)[0]))
    if refusal:
        return [DoctorFinding("storage: tables", "broken", f"the database {refusal}")]
    return [DoctorFinding("storage: tables", "ok", "this role may write them")]
