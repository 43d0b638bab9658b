"""`moored doctor` for access and audit: TLS, tokens, issuer, audit log, disk, owners of files."""

import asyncio
import contextlib
import os
import shlex
import shutil
import ssl
import time
from pathlib import Path
from typing import Final

from moorage.commands.errors import is_of_another_than_root, name_user
from moorage.config.settings import Config
from moorage.daemon.access.audit_files import FOLDER, read_end
from moorage.daemon.access.audit_mark import read_mark
from moorage.daemon.access.tls import ServerTls
from moorage.daemon.access.token_store import TokenStore, TokenStoreError
from moorage.extras import install_command
from moorage.records.findings import DoctorFinding
from moorage.storage.base import StorageError
from moorage.storage.opening import open_storage
from moorage.storage.sqlite import LEDGER_FILE
from moorage.storage.sqlite.facts import read_marks

SOON_SECONDS: Final = 14 * 86_400.0
"""Doctor reports a certificate or token that expires within this many seconds."""
NOW_SECONDS: Final = 86_400.0
"""A certificate that expires within this many seconds counts as broken, unless it was made to
live only so long: such a one is renewed while it has more than a quarter of its life."""
_LAST_PART: Final = 4
DISK_BYTES_MIN: Final = 64 << 20
"""Free bytes of the disk below which the server soon grants nothing."""
_EMPTIED: Final = (
    "no entry, although the ledger has facts; unless the log was off, or the folder was restored "
    "from a backup, the log was removed: put it back"
)
_MIB: Final = 1 << 20
_FILES_SHOWN: Final = 5
_ROUNDS: Final = 4
"""Maximum rounds of a TLS handshake between two sides in memory; TLS 1.3 takes two."""


def examine_access(config: Config) -> list[DoctorFinding]:
    """Examine each part of access; a part that is not configured has no finding."""
    return [
        *_tls(config),
        _tokens(config),
        *_issuer(config),
        _audit_log(config),
        _disk(config),
        *_owners(config.data_dir),
    ]


def shown_certificate(host: str, port: int, seconds_max: float) -> str:
    """Return the certificate that a server at a port shows, as PEM; empty: it shows none."""
    try:
        return ssl.get_server_certificate((host, port), timeout=seconds_max).strip()
    except (OSError, ValueError):
        return ""


def is_certificate_of(config: Config, shown: str) -> bool:
    """Return whether a certificate that a server shows is that of these settings."""
    assert config.tls_cert is not None
    try:
        return bool(shown) and shown in config.tls_cert.read_text()
    except (OSError, ValueError):
        return False


def _tls(config: Config) -> list[DoctorFinding]:
    if config.tls_cert is None or config.tls_key is None:
        return []
    try:
        tls = ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)
        shown = _peer(tls, config.tls_cert)
        begins, ends = (ssl.cert_time_to_seconds(shown[each]) for each in ("notBefore", "notAfter"))
    except (OSError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = "correct tls_cert, tls_key or tls_client_ca, or replace that file"
        return [DoctorFinding("tls", "broken", f"{reason}; {advice}")]
    left = ends - time.time()
    if left < SOON_SECONDS:
        advice = f"{config.tls_cert} expires {_in(left)}: replace it and its key"
        late = left < min(NOW_SECONDS, (ends - begins) / _LAST_PART)
        return [DoctorFinding("tls", "broken" if late else "warning", advice)]
    return [DoctorFinding("tls", "ok", f"{config.tls_cert} expires {_in(left)}")]


def _peer(tls: ServerTls, certificate: Path) -> dict[str, str]:
    """Return the server's certificate as a client sees it, unverified.

    Raises:
        OSError: The handshake fails, for example because the certificate has expired.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.context.wrap_bio(there, back, server_side=True)
    client = context.wrap_bio(back, there)
    for _ in range(_ROUNDS):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                try:
                    side.do_handshake()
                except ssl.SSLCertVerificationError as error:
                    raise OSError(f"{certificate}: {error.verify_message}") from error
                except ssl.SSLError:
                    if side is client:
                        raise
    return {name: str(value) for name, value in (client.getpeercert() or {}).items()}


def _tokens(config: Config) -> DoctorFinding:
    now = time.time()
    try:
        with contextlib.closing(
            TokenStore(open_storage(config.storage, config.data_dir, looks=True).tokens())
        ) as store:
            named = list(store.tokens().values())
    except (TokenStoreError, StorageError, OSError) as error:
        return DoctorFinding("tokens", "broken", str(error))
    valid = [each for each in named if each.is_valid(now)]
    soon = [
        f"{each.name} {_in(each.expires_at - now)}"
        for each in valid
        if each.expires_at is not None and each.expires_at < now + SOON_SECONDS
    ]
    if not (named or config.tokens or config.oidc_issuer):
        return DoctorFinding("tokens", "ok", "none: every local program has the role admin")
    counted = f"{len(valid)} of {len(named)} named ones are valid, {len(config.tokens)} in settings"
    if soon:
        return DoctorFinding("tokens", "warning", f"{counted}; these expire: {', '.join(soon)}")
    return DoctorFinding("tokens", "ok", counted)


def _issuer(config: Config) -> list[DoctorFinding]:
    if not config.oidc_issuer:
        return []
    try:
        from moorage.daemon.access import oidc_keys  # noqa: PLC0415  # An extra.
    except ModuleNotFoundError as error:
        advice = f"needs {error.name}: {install_command('oidc')}"
        return [DoctorFinding("issuer", "broken", advice)]
    keys = oidc_keys.IssuerKeys(config.oidc_issuer)
    try:
        found = asyncio.run(keys.fetch())
    except oidc_keys.KeysUnavailableError as error:
        return [DoctorFinding("issuer", "broken", f"none of its tokens can be verified: {error}")]
    return [DoctorFinding("issuer", "ok", f"{config.oidc_issuer} has {len(found)} keys")]


def _audit_log(config: Config) -> DoctorFinding:
    if not config.audit_days:
        return DoctorFinding("audit log", "missing", "off, as the setting `audit_days` says")
    try:
        rows = open_storage(config.storage, config.data_dir).audit()
        if rows is None:
            number = read_end(config.data_dir).number
        else:
            with contextlib.closing(rows):
                number = rows.end().number
    except (OSError, ValueError, StorageError) as error:
        reason = str(error).rstrip(".")
        return DoctorFinding("audit log", "broken", f"{reason}; see `moored audit verify`")
    if rows is None and not number and _has_facts(config.data_dir):
        return DoctorFinding("audit log", "warning", f"{config.data_dir / FOLDER}: {_EMPTIED}")
    if rows is None:
        try:
            read_mark(config.data_dir)
        except (OSError, ValueError) as error:
            return DoctorFinding("audit log", "warning", str(error))
    last = f"the last entry is {number}" if number else "no entry yet"
    return DoctorFinding("audit log", "ok", f"{last}; `moored audit verify` checks all of them")


def _has_facts(folder: Path) -> bool:
    try:
        return read_marks(folder / LEDGER_FILE)[0].first > 0
    except OSError:  # The finding about the ledger reports this error.
        return False


def _disk(config: Config) -> DoctorFinding:
    """Check the free space of the data folder's disk, even if the folder does not exist yet."""
    folder = next(each for each in (config.data_dir, *config.data_dir.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    detail = f"{free // _MIB} MiB are free for {config.data_dir}"
    if free < DISK_BYTES_MIN:
        return DoctorFinding("disk", "broken", f"{detail}: make room, or the server grants nothing")
    return DoctorFinding("disk", "ok", detail)


def _owners(folder: Path) -> list[DoctorFinding]:
    """Name the files of a data folder that its owner may not use, such as those of root."""
    found = [each for each in (*folder.glob("*"), *folder.glob(f"{FOLDER}/*")) if _is_foreign(each)]
    if not found:
        return []
    names = sorted(str(each.relative_to(folder)) for each in found)
    others = f" and {len(names) - _FILES_SHOWN} more" if len(names) > _FILES_SHOWN else ""
    give = shlex.join(["chown", "-R", name_user(folder.stat().st_uid), str(folder)])
    detail = (
        f"{folder} has files that do not belong to the folder's owner, whose server cannot use "
        f"them: {', '.join(names[:_FILES_SHOWN])}{others}; as root, run `{give}`"
    )
    # Root can use all files, and may run the server itself unless another user's server ran here.
    serves = os.geteuid() == 0 and not is_of_another_than_root(folder)
    return [DoctorFinding("files", "missing" if serves else "broken", detail)]


def _is_foreign(file: Path) -> bool:
    me = os.geteuid()
    try:
        owner, of_folder = file.stat().st_uid, file.parent.stat().st_uid
    except OSError:  # A running server may have removed the file.
        return False
    if file.name == "lost+found":  # The folder is a whole disk.
        return False
    if me == 0:
        return owner == 0 != of_folder
    return owner != me and not os.access(file, os.R_OK | os.W_OK)


def _in(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 0:
        return "in the past"
    days = int(seconds // 86_400)
    return f"in {days} days" if days else "within a day"
