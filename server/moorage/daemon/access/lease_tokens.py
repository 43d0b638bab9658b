"""The tokens of leases: derived from the server's secret and the lease's id, and never stored.

`admission` makes a token for every request of a lease and sends it with the grant. The core, the
ledger and its checkpoints know only digests. A request that is repeated with its idempotency key
gets the same token, even after a restart: the server derives the token again.

The digest is a plain SHA-256. A slow, salted digest protects passwords that people choose; a token
has 144 random bits, which no search finds.
"""

import binascii
import hashlib
import hmac
from typing import Final

from moorage.model import Lease, RequestId

_TOKEN_BYTES: Final = 18
_SAFE_IN_URLS: Final = bytes.maketrans(b"+/", b"-_")


class LeaseTokens:
    """Makes the tokens of leases.

    Args:
        secret: The key of the tokens, which only this server knows.
    """

    def __init__(self, secret: bytes) -> None:
        # Copying this object takes half the time of `hmac.digest`.
        self._keyed = hmac.new(secret, digestmod="sha256")

    def make(self, lease: RequestId) -> str:
        """Return the token of the lease that a request of this id may be granted."""
        keyed = self._keyed.copy()
        keyed.update(f"lease {lease}".encode())
        encoded = binascii.b2a_base64(keyed.digest()[:_TOKEN_BYTES], newline=False)
        return encoded.translate(_SAFE_IN_URLS).decode()

    def of(self, lease: Lease) -> str:
        """Return the token of a lease; "" if the token was made with another secret."""
        token = self.make(lease.id)
        return token if digest(token) == lease.token_digest else ""


def digest(token: str) -> str:
    """Return the digest of a token, the only form that is stored."""
    return hashlib.sha256(token.encode()).hexdigest()
