"""Under which names the ports answer, and for whose pages, as configured; the daemon calls it."""

from moorage.config.settings import Config
from moorage.protocol.origins import Origins


def names(config: Config) -> Origins:
    """Return the names under which the ports answer."""
    hosts = (config.host, config.http_host, *config.allowed_hosts)
    return Origins(hosts, config.allowed_origins)
