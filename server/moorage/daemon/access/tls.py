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

_ADVICE: Final = b"This port speaks TLS: use https://, or wss:// for the WebSocket.\n"
_PLAIN: Final = (
    b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.2, HTTP/1.1\r\nConnection: Upgrade, close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(_ADVICE), _ADVICE)
)
"""Answers HTTP without TLS (RFC 2817, 4.2)."""

log = structlog.get_logger("moored")

_Stamp = tuple[tuple[int, int, int] | None, ...]


class _Context(ssl.SSLContext):
    """Answers those who speak HTTP without TLS, instead of closing in silence."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # As the ssl module has it.
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Return the TLS of one connection."""
        wrapped = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(wrapped, _Connection)
        wrapped.outgoing = outgoing
        return wrapped


class _Connection(ssl.SSLObject):
    """The TLS of one connection."""

    outgoing = ssl.MemoryBIO()  # The context gives each its own.
    has_replied = False

    def do_handshake(self) -> None:
        """Go on with the handshake; bytes that are no TLS get one answer, then an error."""
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if self.has_replied or error.reason != "HTTP_REQUEST":
                raise
            self.has_replied = True
            self.outgoing.write(_PLAIN)
            raise ssl.SSLWantReadError("answered without TLS") from error


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
        self.context = _Context(ssl.PROTOCOL_TLS_SERVER)
        self.context.sslobject_class = _Connection
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
