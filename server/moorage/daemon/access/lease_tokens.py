"""The tokens of leases: made of a secret of this server and the lease's id, and never stored.

`admission` makes one for every ask and tells it with the grant; the core, the ledger and its
checkpoints know digests alone. A request that comes again with its idempotency key is told the
same token, since it is made again, after a restart too.

The digest is a plain SHA-256. A slow, salted one protects what people think up; a token has 144
bits that cannot be guessed, so that no search finds it.
"""

import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

from moorage.model import Lease, RequestId

SECRET_BYTES: Final = 32
_TOKEN_BYTES: Final = 18
_SAFE_IN_URLS: Final = bytes.maketrans(b"+/", b"-_")


class LeaseTokens:
    """Makes tokens.

    Args:
        secret: Known to this server alone.

    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, lease: RequestId) -> str:
        """Return the token of the lease that a request of this id may be granted."""
        keyed = hmac.digest(self._secret, f"lease {lease}".encode(), "sha256")
        encoded = binascii.b2a_base64(keyed[:_TOKEN_BYTES], newline=False)
        return encoded.translate(_SAFE_IN_URLS).decode()

    def of(self, lease: Lease) -> str:
        """Return the token of a lease; "" where it was made with another secret."""
        token = self.make(lease.id)
        return token if digest(token) == lease.token_digest else ""


def digest(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def open_secret(path: Path) -> bytes:
    """Return the secret in a file that only its owner may read; made where it is missing.

    Raises:
        OSError: It cannot be read or written, or holds something else.

    """
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return _make_secret(path)
    if len(secret) != SECRET_BYTES:
        raise OSError(
            f"{path}: expected {SECRET_BYTES} bytes, got {len(secret)}. Restore it from a backup, "
            "or delete it: leases then stand, but their tokens cannot be told again."
        )
    return secret


def _make_secret(path: Path) -> bytes:
    secret, unfinished = secrets.token_bytes(SECRET_BYTES), path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)  # A crash may have left one.
    with open(unfinished, "xb", opener=_private) as file:  # Path.open has no opener.
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # Else a crash could forget the name that tokens depend on.
    finally:
        os.close(folder)
    return secret


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
