"""Clients of a Moorage server, for programs and for people.

`Client` is for programs with an event loop, `BlockingClient` for all others; `ClusterClient` and
`GlobalClusterMetricsClient` let a policy run outside the server; `moorage` is the command line.

All errors are one tree:

    MoorageError
    ├── ConnectionFailed       nothing answers at the URL, or the socket broke
    │   ├── ProtocolViolated   something answers, but does not speak Moorage's protocol
    │   ├── AddressesFailed    none of several addresses leads to a working server
    │   ├── ProxyFailed        a proxy from the environment refused the connection or failed
    │   └── CertificateRefused the server's certificate is not trusted, or it has none
    ├── SettingRefused         an argument or environment variable cannot be used
    ├── Timeout                no reply in time (also a TimeoutError)
    ├── LeaseLost              the lease of a `with` block has ended: stop using its GPUs
    ├── WorkflowError          a graph of tasks cannot run (`moorage_client.workflow`)
    ├── InventoryError         a source of inventory cannot be read (`moorage_client.inventory`)
    └── RequestRefused         the server said no: code, reason, field, expected, details, request
        ├── NoCapacity         the request does not fit now, or did not within `wait_seconds`
        ├── NeverFits          the request would not fit even if the fleet were empty
        ├── Unauthorized       unknown token, or not the token of that lease
        ├── NotFound           no such policy, cluster, lease or request
        ├── LeaseEnded         the named lease has ended
        └── RuleFailed         the policy raised, timed out, crashed, or returned a wrong value

`APIError` of `GlobalClusterMetricsClient` is not in this tree, as documented.
"""

TYPE_CHECKING = False  # Not from `typing`: its import takes longer than all else here.

if TYPE_CHECKING:
    from moorage_client.answers import Answer, Lease, Workload
    from moorage_client.blocking import BlockingClient
    from moorage_client.client import Client
    from moorage_client.errors import (
        AddressesFailed,
        CertificateRefused,
        ConnectionFailed,
        LeaseEnded,
        LeaseLost,
        MoorageError,
        NeverFits,
        NoCapacity,
        NotFound,
        ProtocolViolated,
        ProxyFailed,
        RequestRefused,
        RuleFailed,
        SettingRefused,
        Timeout,
        Unauthorized,
    )
    from moorage_client.holding import HeldLease
    from moorage_client.services import (
        APIError,
        ClusterClient,
        GlobalClusterMetricsClient,
        Services,
    )

__all__ = [
    "APIError",
    "AddressesFailed",
    "Answer",
    "BlockingClient",
    "CertificateRefused",
    "Client",
    "ClusterClient",
    "ConnectionFailed",
    "GlobalClusterMetricsClient",
    "HeldLease",
    "Lease",
    "LeaseEnded",
    "LeaseLost",
    "MoorageError",
    "NeverFits",
    "NoCapacity",
    "NotFound",
    "ProtocolViolated",
    "ProxyFailed",
    "RequestRefused",
    "RuleFailed",
    "Services",
    "SettingRefused",
    "Timeout",
    "Unauthorized",
    "Workload",
]

_HOMES = {
    "Answer": "answers",
    "BlockingClient": "blocking",
    "Client": "client",
    "HeldLease": "holding",
    "Lease": "answers",
    "APIError": "services",
    "ClusterClient": "services",
    "GlobalClusterMetricsClient": "services",
    "Services": "services",
    "Workload": "answers",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the command line must start quickly."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  # As the rest of this function.

    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
