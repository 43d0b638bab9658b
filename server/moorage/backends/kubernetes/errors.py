"""Errors of calls to a cluster; the package's docstring has their tree."""


class KubernetesError(Exception):
    """A call to the cluster failed; the message says why."""


class ConfigurationError(KubernetesError):
    """The kubeconfig cannot be read, or lacks the named context."""


class NoAnswerError(KubernetesError):
    """The cluster's API server did not answer in time, or cut the connection."""


class RefusedError(KubernetesError):
    """The cluster's API server refused the call.

    Args:
        status: The HTTP status; 410: the API server no longer has the requested version.
        reason: The API's word for the reason, such as `Forbidden` or `AlreadyExists`.
        message: The API server's message.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the API server refused with {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
