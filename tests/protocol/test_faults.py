"""Tests of the HTTP status that belongs to each error code."""

from collections.abc import Iterator

from moorage.model import Code
from moorage.protocol.faults import status_of

STATUSES = {
    400: "bad_json bad_message missing_fields unknown_op unsupported bad_policy",
    401: "unauthorized",
    403: "forbidden wrong_token",
    404: "unknown_policy unknown_clusters unknown_lease unknown_request not_found",
    409: "already_exists cancelled conflict idempotency_mismatch lease_ended no_capacity"
    " policy_declined quota_exceeded wait_timeout",
    413: "too_large",
    421: "not_leader",
    422: "never_fits",
    429: "busy",
    500: "engine_failed internal policy_bad_output policy_crashed policy_error policy_memory"
    " policy_timeout policy_unsound",
    503: "shutting_down unavailable",
}


def codes() -> Iterator[tuple[str, int]]:
    for status, names in STATUSES.items():
        for name in names.split():
            yield name, status


def test_a_refusal_has_a_status_4xx_and_only_a_fault_of_the_server_has_5xx() -> None:
    assert {code.value: status_of(code) for code in Code} == dict(codes())
