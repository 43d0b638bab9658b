"""`moored storage copy`: copies a server's data from a data folder to a database, or back."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

from moorage.catalog.embedded.integrity import is_intact
from moorage.daemon.access import audit_files, audit_table
from moorage.daemon.access.audit_chain import ChainError
from moorage.ledger.codec import is_sealed, link
from moorage.storage.base import Contents, StorageCorrupt, StorageError, run
from moorage.storage.opening import need_postgres
from moorage.storage.sqlite import contents as folders
from moorage.storage.sqlite.backup import is_filled, stage


@dataclass(slots=True)
class CopyReport:
    """The amounts of copied data, or of data that the target had already.

    Attributes:
        is_new: Whether the target did not exist before.
        facts: Number of facts; the other fields are numbers, too.
    """

    is_new: bool = True
    facts: int = 0
    records: int = 0
    tokens: int = 0
    agents: int = 0


def copy(source: str, target: str, *, audit: bool = True) -> CopyReport:
    """Copy a storage to an empty storage of the other kind, and compare both.

    A database has a sign of the copy until it is filled, in one transaction; a folder is filled
    beside its final place. So no server can start on a part of an interrupted copy, and the next
    call starts from the beginning.

    Args:
        source: Data folder or address of the data.
        target: Data folder or address of the copy.
        audit: Whether the audit log is copied, too.

    Raises:
        StorageError: A server uses one of the storages, the source or its audit log is damaged, or
            the target is not empty.
        OSError: A file cannot be written.
    """
    if is_address(source) == is_address(target):
        raise StorageError(
            "one of FROM and TO must be a data folder, the other one postgresql://…; `moored "
            "backup` copies a folder to a folder, pg_dump copies a database"
        )
    need_postgres()
    from moorage.storage.postgres.connection import has_password  # noqa: PLC0415  # An extra.

    if has_password(source if is_address(source) else target):
        raise StorageError(
            "a password in an argument is shown to all users of this machine, by ps: give it in "
            "PGPASSWORD or in a password file"
        )
    return (
        _from_database(source, Path(target), audit=audit)
        if is_address(source)
        else _from_folder(Path(source), target, audit=audit)
    )


def is_address(text: str) -> bool:
    """Return whether a text is the address of a database, and not a folder."""
    return text.startswith(("postgresql:", "postgres:"))


def _from_folder(folder: Path, address: str, *, audit: bool) -> CopyReport:
    from moorage.storage.postgres import contents as databases  # noqa: PLC0415  # An extra.

    report = CopyReport()
    with folders.reading(folder) as there:
        _refuse_gaps(there)
        source = _with_log(there, partial(audit_files.verify, folder), audit=audit)
        report.is_new = databases.fill(address, source, partial(_compare, report, source))
    return report


def _from_database(address: str, folder: Path, *, audit: bool) -> CopyReport:
    from moorage.storage.postgres import contents as databases  # noqa: PLC0415  # An extra.

    report = CopyReport()
    with databases.reading(address) as stored:
        if stored.is_empty():
            raise StorageError(f"{stored.place} has nothing to copy.")
        source = _with_log(stored, partial(_verify_audit, address), audit=audit)
        if is_filled(folder):
            report.is_new = False
            with folders.reading(folder) as there:
                _compare(report, source, there)
            return report
        with stage(folder) as new:
            folders.fill(new, source)
            with folders.reading(new) as there:
                _compare(report, source, there)
    return report


def _refuse_gaps(source: Contents) -> None:
    pruned = source.facts.pruned_seq()
    for first, last in source.facts.lost_ranges():
        if last > pruned:
            raise StorageError(
                f"{source.place} lacks {run(first, last)}, whose loss was accepted in a repair. "
                "The tables in PostgreSQL cannot have such a gap. "
                "Copy the folder once the facts around the gap are pruned by age."
            )


def _verify_audit(address: str) -> None:
    from moorage.storage.postgres.audit import PostgresAudit  # noqa: PLC0415  # An extra.

    with closing(PostgresAudit(address)) as rows:
        audit_table.verify_rows(rows)


def _with_log(source: Contents, verify: Callable[[], object], *, audit: bool) -> Contents:
    """Return the contents with their audit log if it verifies, or without it if it is unwanted.

    Raises:
        StorageError: The audit log has gaps or changes, which a copy would no longer show.
    """
    if not audit:
        return replace(source, audit=lambda: iter(()), audit_begin=None)
    try:
        verify()
    except ChainError as error:
        raise StorageError(
            f"{source.place} was not copied, since `moored audit verify` fails there: {error}. Put "
            "a sound copy of the audit log back. Or keep the log elsewhere, and copy the rest with "
            "--without-audit."
        ) from error
    return source


def _compare(report: CopyReport, source: Contents, target: Contents) -> None:
    """Read both storages; refuse damage in the source, and differences in the target."""
    same = (
        _same_facts(report, source, target)
        and list(source.checkpoints()) == list(target.checkpoints())
        and source.facts.pruned_seq() == target.facts.pruned_seq()
        and _same_records(report, source, target)
        and source.tokens == target.tokens
        and source.agents == target.agents
        and source.secret == target.secret
        and source.fencing <= target.fencing
        and all(mine == theirs for mine, theirs in zip_longest(source.audit(), target.audit()))
        and source.audit_begin in {None, target.audit_begin}
    )
    if not same:
        raise StorageError(
            f"{target.place} has other data than {source.place}, and was not changed. Name an "
            "empty database, or a new folder."
        )
    report.tokens, report.agents = len(source.tokens), len(source.agents)


def _same_facts(report: CopyReport, source: Contents, target: Contents) -> bool:
    pruned = source.facts.pruned_seq()
    before = (pruned, source.facts.chain_of(pruned))
    theirs = chain.from_iterable(target.fact_pages())
    for row, copied in zip_longest(chain.from_iterable(source.fact_pages()), theirs):
        if row is None or row != copied:
            return False
        seq, linked = before
        follows = linked is None or row.chain == link(row.checksum, linked)
        if not (is_sealed(row) and row.seq == seq + 1 and follows):
            finding = f"fact {row.seq} was changed, or is not linked to the fact before"
            raise StorageCorrupt(source.place, finding)
        before = (row.seq, row.chain)
        report.facts += 1
    return True


def _same_records(report: CopyReport, source: Contents, target: Contents) -> bool:
    for kind, tally in source.records.tallies().items():
        if tally[:2] != tally[2:]:
            finding = f"the records of kind {kind} were changed"
            raise StorageCorrupt(source.place, finding)
    for mine, theirs in zip_longest(source.records_by_age(), target.records_by_age()):
        if mine is None or mine != theirs:
            return False
        if not is_intact(*mine):
            finding = f"the {mine[0]} {mine[1].id!r} does not match its checksum"
            raise StorageCorrupt(source.place, finding)
        report.records += 1
    return True
