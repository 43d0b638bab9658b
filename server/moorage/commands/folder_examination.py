"""`moored doctor` for the data folder: what a start reads of it, and who else may read it."""

import asyncio
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from moorage.config.settings import Config
from moorage.core.state.facts import Fact
from moorage.ledger.base import LedgerError
from moorage.ledger.contents import LedgerContents, changes_of
from moorage.ledger.following import FollowedLedger
from moorage.records.findings import DoctorFinding, DoctorState
from moorage.storage.base import StorageCorrupt, StorageError, lost_records
from moorage.storage.sqlite import CATALOG_FILE, LEDGER_FILE, SECRET_FILE
from moorage.storage.sqlite import facts as facts_file
from moorage.storage.sqlite import records as records_file
from moorage.storage.sqlite.files import check_pages_in_time, connect_to_look, translate_errors
from moorage.storage.sqlite.shared_file import SqliteAgents, SqliteLogins
from moorage.storage.sqlite.storage import SqliteStorage, read_secret

READ_SECONDS_MAX: Final = 10.0
"""Seconds for reading the facts that a start reads, and for checking the pages of a file."""
_LOOKS: Final = 3
"""Looks at a file that a server writes: a look while it writes may see half of a change."""
_LOOKS_ALONE: Final = 2
"""Looks at a file that no server writes: a server may start during the first look."""
_PAUSE_SECONDS: Final = 0.3
_OTHERS: Final = 0o077
"""The bits of a file's mode that give other users any right."""


def examine_folder(folder: Path, ledger: DoctorFinding, *, runs: bool) -> list[DoctorFinding]:
    """Look at the files as a start does, and at their pages. Raises nothing.

    Args:
        folder: The data folder, in which this user may write, or which is missing.
        ledger: The finding if nothing is wrong.
        runs: Whether a server uses the folder.
    """
    contents = LedgerContents()
    findings = [ledger]
    looks: tuple[tuple[str, Callable[[], None]], ...] = (
        ("ledger", lambda: _look_at_ledger(folder / LEDGER_FILE, contents)),
        ("catalog", lambda: _look_at_catalog(folder)),
    )
    for name, look in looks:
        if fault := _find_fault(look, _LOOKS if runs else _LOOKS_ALONE):
            findings = [each for each in findings if each.name != name]
            findings.append(DoctorFinding(name, "broken", fault))
    if ledger in findings:
        findings += _marks(folder / LEDGER_FILE)
    findings += _shared(folder)
    return findings + list(_secret(folder / SECRET_FILE, len(contents.names["lease"])))


def _find_fault(look: Callable[[], None], looks: int) -> str:
    """Return the fault that each of several looks finds; empty if one finds none."""
    for left in reversed(range(looks)):
        try:
            look()
        except (StorageError, LedgerError, OSError) as error:
            if not left:
                return str(error)
            time.sleep(_PAUSE_SECONDS)  # No event tells when the server has written.
        else:
            return ""
    return ""


def _look_at_ledger(ledger: Path, contents: LedgerContents) -> None:
    """Read what a start reads of a ledger, and collect the names in it.

    Raises:
        StorageError: The ledger is damaged, or cannot be read.
        LedgerError: A fact or checkpoint is damaged.
    """
    with translate_errors(facts_file.place_of(ledger)):
        facts_file.look(ledger)
    if facts_file.is_ledger(ledger):
        asyncio.run(_load(ledger, contents))
        _check_pages(ledger, facts_file.place_of(ledger))


async def _load(ledger: Path, contents: LedgerContents) -> None:
    def take(facts: Sequence[Fact]) -> None:
        for fact in facts:
            contents.take(changes_of(fact))

    try:
        async with asyncio.timeout(READ_SECONDS_MAX):
            await FollowedLedger(facts_file.LookedFacts(ledger)).load(take)
    except TimeoutError:
        return  # What was read is sound.


def _look_at_catalog(folder: Path) -> None:
    """Look at a catalog as a start does.

    Raises:
        StorageError: The catalog is damaged, lost, or cannot be read.
    """
    catalog = folder / CATALOG_FILE
    place = records_file.place_of(catalog)
    with translate_errors(place):
        found = records_file.look(catalog)
        ledger, _ = facts_file.read_marks(folder / LEDGER_FILE)
    if catalog.exists():
        _check_pages(catalog, place)
    elif ledger.first and not found.exists:
        raise StorageError(lost_records(place))


def _check_pages(file: Path, place: str) -> None:
    with translate_errors(place), closing(connect_to_look(file)) as connection:
        finding = check_pages_in_time(connection, READ_SECONDS_MAX)
    if finding:
        raise StorageCorrupt(place, finding)


def _marks(ledger: Path) -> Iterator[DoctorFinding]:
    """Yield warnings about damaged files beside the ledger that a start writes again."""
    place = facts_file.place_of(ledger)
    try:
        found, fencing = facts_file.read_marks(ledger)
    except OSError as error:
        yield DoctorFinding("ledger marks", "broken", f"{place} cannot be opened: {error}.")
        return
    for each in (found, fencing):
        if found.first and each.doubt:
            yield DoctorFinding(
                "ledger marks", "warning", f"{place}: {each.doubt}; a start writes it again"
            )


def _shared(folder: Path) -> Iterator[DoctorFinding]:
    """Yield findings about damaged files of the agents and of the logins to the console."""
    storage = SqliteStorage(folder, looks=True)
    tables: tuple[tuple[str, DoctorState, SqliteAgents | SqliteLogins], ...] = (
        ("agents", "broken", storage.agents()),
        ("console logins", "warning", storage.logins()),  # A start does not read them.
    )
    for name, state, table in tables:
        with closing(table):
            try:
                if table.version() is not None:
                    table.rows()
            except StorageError as error:
                yield DoctorFinding(name, state, str(error))


def _secret(file: Path, leases: int) -> Iterator[DoctorFinding]:
    """Yield a finding about the secret of leases' tokens, unless it is sound or not needed."""
    try:
        read_secret(file)
    except FileNotFoundError:
        if leases:
            detail = (
                f"{file} is missing, and there are leases: restore it from a backup, or the next "
                "start makes a new one; then a client that lost the token of its lease cannot get "
                "another"
            )
            yield DoctorFinding("lease secret", "warning", detail)
    except (StorageError, OSError) as error:
        yield DoctorFinding("lease secret", "broken", str(error))  # A start refuses it.


def examine_modes(config: Config, file: Path | None) -> list[DoctorFinding]:
    """Name secrets that other users may read, by the modes of their files. Raises nothing.

    Args:
        config: The settings.
        file: The TOML file of the settings.
    """
    secrets = [config.data_dir, config.data_dir / SECRET_FILE, config.tls_key]
    if file is not None and _has_tokens(file):
        secrets.append(file)
    open_to = [each for each in secrets if each is not None and _mode(each) & _OTHERS]
    if not open_to:
        return []
    named = ", ".join(f"{each} ({_mode(each):04o})" for each in open_to)
    detail = f"other users may have rights to {named}: run `chmod go= FILE` on each"
    return [DoctorFinding("secrets", "warning", detail)]


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:  # Other findings say so if it is needed.
        return 0


def _has_tokens(file: Path) -> bool:
    try:
        return bool(tomllib.loads(file.read_text("utf-8-sig")).get("tokens"))
    except (OSError, ValueError):  # It was readable when the settings were read.
        return False
