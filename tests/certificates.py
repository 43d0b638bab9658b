"""Makes certificate authorities and certificates for tests."""

import datetime as dt
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate(subject, issuer=None, days=1):
    """Return a key and a certificate signed by the issuer; without an issuer, a self-signed one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    signer_key, signer = issuer or (key, None)
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key())
    usage = x509.KeyUsage(True, *[False] * 4, issuer is None, *[False] * 3)  # noqa: FBT003  # The library's arguments.
    built = (
        x509.CertificateBuilder(signer.subject if signer else name, name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=2))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signed_by, critical=False)
        .add_extension(usage, critical=True)
        .sign(signer_key, hashes.SHA256())
    )
    return key, built


def pem_of(key, built) -> tuple[bytes, bytes]:
    """Return a certificate and its key in PEM format."""
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return built.public_bytes(serialization.Encoding.PEM), private
