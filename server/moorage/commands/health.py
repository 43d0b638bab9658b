"""`moored health`: check whether the server answers, for health checks of containers."""

import http.client
import socket
import ssl
from ipaddress import ip_address
from typing import Annotated, Final

import typer

from moorage.commands.errors import fail, load_config
from moorage.commands.options import FileOption
from moorage.config.settings import Config

_SECONDS: Final = 4.0
_IPV4: Final = 4


def health(
    http_port: Annotated[int | None, typer.Option(help="Port of HTTP.")] = None,
    config: FileOption = None,
) -> None:
    """Check once whether the server on this machine answers; exit 1 if it does not.

    If clients need certificates, it only checks that the port is open.
    """
    settings = load_config({"http_port": http_port}, config)
    host = _address(settings)
    try:
        answer = _ask(settings, host)
    except (OSError, http.client.HTTPException) as error:
        place = f"{host}:{settings.http_port}"
        fail(f"no answer at {place}: {str(error) or type(error).__name__}")
    typer.echo(answer)


def _address(settings: Config) -> str:
    """Return the HTTP address; the loopback address if the server listens on all addresses."""
    host = settings.http_host or settings.host
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == _IPV4 else "::1"
    return host


def _ask(settings: Config, host: str) -> str:
    """Return the server's answer to `/healthz`."""
    if settings.tls_client_ca is not None:
        socket.create_connection((host, settings.http_port), _SECONDS).close()
        return "The port is open."
    if settings.tls_cert is None:
        connection = http.client.HTTPConnection(host, settings.http_port, timeout=_SECONDS)
    else:
        # The certificate has the name by which clients reach the server, not this address.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            host, settings.http_port, timeout=_SECONDS, context=context
        )
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace").strip()
    connection.close()
    if answer.status != http.client.OK:
        raise OSError(f"{answer.status} {answer.reason}: {text[:200]}")
    return text
