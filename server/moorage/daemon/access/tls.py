"""TLS of both ports: the server's certificate, and the authorities of client certificates.

Renewed files are in force soon after they changed: for each new connection, the context of both
ports uses another context, made from the files as last read. Open connections stay open, unless the
authority of the client's certificate is no longer trusted.
"""

import asyncio
import ssl
from pathlib import Path
from typing import Final
from weakref import WeakSet

import structlog

LOOK_SECONDS: Final = 2.0
"""Seconds between two checks of the files. The files are read once two checks find them equal,
since a renewal writes one file after the other."""

_ADVICE: Final = b"This port speaks TLS: use https://, or wss:// for the WebSocket.\n"
_PLAIN: Final = (
    b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.2, HTTP/1.1\r\nConnection: Upgrade, close\r\n"
    b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(_ADVICE), _ADVICE)
)
"""The answer to HTTP without TLS (RFC 2817, 4.2)."""

_DER: Final = 2
"""How `_ssl` names the DER encoding of a certificate."""

log = structlog.get_logger("moored")

_Stamp = tuple[tuple[int, int, int] | None, ...]


class _DoorContext(ssl.SSLContext):
    """The SSL context that both ports hold while they are open."""

    current = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # Each object gets its own.
    """The SSL context that serves new connections."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # As the ssl module has it.
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Return the TLS of one connection."""
        return self.current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class _Context(ssl.SSLContext):
    """An SSL context that answers plain HTTP with an error, instead of closing in silence."""

    connections = WeakSet["_Connection"]()  # noqa: RUF012  # Each object gets that of its `ServerTls`.

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
        self.connections.add(wrapped)
        return wrapped


class _Connection(ssl.SSLObject):
    """The TLS of one connection."""

    outgoing = ssl.MemoryBIO()  # The context gives each object its own.
    has_replied = False
    is_refused = False
    """True: the next bytes from the client, be it a message or a pong, close the connection."""

    def read(self, len: int = 1024, buffer: bytearray | None = None) -> int:  # type: ignore[override]  # noqa: A002  # As the ssl module has it.
        """Read received bytes, unless the client's authority is no longer trusted."""
        if self.is_refused:
            raise ssl.SSLError("the authority of the client's certificate is no longer trusted")
        return super().read(len, buffer)  # type: ignore[return-value]  # Bytes without a buffer.

    def is_of(self, authorities: frozenset[bytes]) -> bool:
        """Return whether one of these authorities verified a client's certificate."""
        try:
            if hasattr(self, "get_verified_chain"):
                chain: list[bytes] = self.get_verified_chain()
            else:  # Until Python 3.12.
                found = getattr(self, "_sslobj").get_verified_chain() or ()  # noqa: B009  # typeshed has it not.
                chain = [each.public_bytes(_DER) for each in found]
        except ValueError:  # The handshake is under way, or failed.
            return False
        return not authorities.isdisjoint(chain)

    def do_handshake(self) -> None:
        """Continue the handshake; bytes that are not TLS get one HTTP answer, then an error."""
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if self.has_replied or error.reason != "HTTP_REQUEST":
                raise
            self.has_replied = True
            self.outgoing.write(_PLAIN)
            raise ssl.SSLWantReadError("answered without TLS") from error


class ServerTls:
    """Makes the TLS context of both ports, and renews it when a file changes.

    Args:
        certificate: PEM file with the certificate, and intermediate ones.
        key: PEM file with its private key, without a passphrase.
        client_authority: PEM file with the authorities of clients' certificates; None: clients need
            no certificate.

    Attributes:
        context: The TLS context of new connections.
        expires_at: When the served certificate expires, in seconds since the epoch.
        lifetime: The seconds from the begin of the served certificate to its end.

    Raises:
        OSError: A file cannot be read or holds no certificate or key, or the two do not match.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_authority = client_authority
        self.context = _DoorContext(ssl.PROTOCOL_TLS_SERVER)
        self._connections: WeakSet[_Connection] = WeakSet()
        self.expires_at = self.lifetime = 0.0
        self._read()

    async def follow(self) -> None:
        """Read the files again when they have changed, until cancelled."""
        known = last = self._stamp()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            before, last = last, self._stamp()
            if last != known and last == before:
                pairs = zip(self._files(), known, last, strict=True)
                changed = [str(file) for file, old, new in pairs if old != new]
                known = last
                try:
                    self._read()
                except OSError as error:
                    log.error("certificate_not_renewed", reason=str(error))  # noqa: TRY400  # A traceback says no more.
                else:
                    log.info("certificate_renewed", file=", ".join(changed))

    def _read(self) -> None:
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _Connection
        context.connections = self._connections
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        if self._client_authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        _load(context, self._certificate, self._key, self._client_authority)
        begins, expires_at = _validity(self._certificate)
        self.context.current = context  # Last: a bad file must not change the context in use.
        self.expires_at, self.lifetime = expires_at, expires_at - begins
        if self._client_authority is not None:
            known = frozenset(context.get_ca_certs(binary_form=True))
            for each in self._connections:
                each.is_refused = not each.is_of(known)

    def _files(self) -> list[Path]:
        files = (self._certificate, self._key, self._client_authority)
        return [each for each in files if each is not None]

    def _stamp(self) -> _Stamp:
        return tuple(map(_stamp, self._files()))


def _load(context: ssl.SSLContext, certificate: Path, key: Path, authority: Path | None) -> None:
    for file in (certificate, key, *(() if authority is None else (authority,))):
        try:  # Else the error does not name the missing file.
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


def _validity(certificate: Path) -> tuple[float, float]:
    """Return begin and end of the first certificate of a PEM file, in seconds since the epoch."""
    decode = getattr(ssl, "_ssl")._test_decode_cert  # noqa: B009, SLF001  # Only this reads PEM.
    shown = decode(str(certificate))
    begins, ends = (ssl.cert_time_to_seconds(shown[each]) for each in ("notBefore", "notAfter"))
    return float(begins), float(ends)


def _refuse_passphrase() -> str:
    raise OSError("the key has a passphrase; the server needs one without")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
