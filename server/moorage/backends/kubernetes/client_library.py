"""The client library of Kubernetes; `connection` takes it from here.

The library looks for the home folder of this user while it is imported, and fails without one,
even where `KUBECONFIG` or the account of a pod makes it needless.
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
    """Name the root as home, as container runtimes do, for as long as a user without one needs."""
    try:
        Path.home()
    except RuntimeError:  # Neither HOME nor an entry in the system's list of users.
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
