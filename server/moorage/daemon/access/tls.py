"""TLS of both doors: the server's certificate, and the authority of certificates of clients.

A renewed certificate is in force soon after its files changed: both doors use one context, and new
connections take what was last read into it.
"""

import asyncio
import ssl
from pathlib import Path
from typing import Final

import structlog

__all__ = ["LOOK_SECONDS", "ServerTls"]

LOOK_SECONDS: Final = 2.0
"""Between two looks at the files; they are read once they are the same at two of them, since a
renewal writes one after the other."""

log = structlog.get_logger("moored")

_Stamp = tuple[tuple[int, int, int] | None, ...]


class ServerTls:
    """The context of both doors.

    Args:
        certificate: PEM file with the certificate, and those of authorities between.
        key: PEM file with its private key, without a passphrase.
        client_authority: PEM file with the authorities of clients' certificates; None: clients
            need none.

    Attributes:
        context: For new connections.

    Raises:
        OSError: A file cannot be read, or holds no certificate or key, or they do not match.

    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_authority = client_authority
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        if client_authority is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._read()

    async def follow(self) -> None:
        """Read the files again when they have changed, until cancelled."""
        known = last = self._stamp()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            before, last = last, self._stamp()
            if last != known and last == before:
                known = last
                try:
                    self._read()
                except OSError as error:
                    log.error("certificate_not_renewed", reason=str(error))  # noqa: TRY400  # It has no more to say.
                else:
                    log.info("certificate_renewed", file=str(self._certificate))

    def _read(self) -> None:
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # A bad file must not spoil what serves.
        for context in (trial, self.context):
            _load(context, self._certificate, self._key, self._client_authority)

    def _stamp(self) -> _Stamp:
        files = (self._certificate, self._key, self._client_authority)
        return tuple(_stamp(each) for each in files if each is not None)


def _load(context: ssl.SSLContext, certificate: Path, key: Path, authority: Path | None) -> None:
    for file in (certificate, key, *(() if authority is None else (authority,))):
        try:  # Else the error does not say which one is missing.
            file.open("rb").close()
        except OSError as error:
            raise OSError(error.errno, f"{file}: {error.strerror}") from error
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        raise OSError(
            f"{certificate} and {key}: expected a certificate and its key without a passphrase, "
            f"as PEM: {error.reason or error}"
        ) from error
    if authority is not None:
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise OSError(f"{authority}: expected certificates as PEM: {error}") from error


def _refuse_passphrase() -> str:
    raise OSError("the key has a passphrase; the server needs one without")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
