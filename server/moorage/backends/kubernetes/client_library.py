"""Imports the client library of Kubernetes, for `connection`.

The library looks up this user's home folder during its import, and fails if there is none, even if
`KUBECONFIG` or a pod's account makes the folder unnecessary.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "ApiClient",
    "ConfigException",
    "Configuration",
    "RESTClientObject",
    "load_incluster_config",
    "load_kube_config",
]


@contextlib.contextmanager
def _home() -> Iterator[None]:
    """Set HOME to `/` during the import if this user has no home, as container runtimes do."""
    try:
        Path.home()
    except RuntimeError:  # There is neither HOME nor an entry in the user database.
        os.environ["HOME"] = "/"
        try:
            yield
        finally:
            del os.environ["HOME"]
    else:
        yield


with _home():
    from kubernetes.aio.client import ApiClient, Configuration
    from kubernetes.aio.client.rest import RESTClientObject
    from kubernetes.aio.config import load_incluster_config, load_kube_config
    from kubernetes.aio.config.config_exception import ConfigException
