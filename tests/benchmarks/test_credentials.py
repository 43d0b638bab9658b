"""No credential that is missing, bad, expired, forged, foreign or revoked lets a request in."""

import pytest

pytestmark = pytest.mark.heavy

KINDS = ("missing", "bad", "expired", "forged", "foreign", "revoked")


def test_invalid_credentials_are_refused_as_documented() -> None:
    pytest.importorskip("jwt", reason="the extra `oidc` is not installed")
    from benchmarks.credentials import credentials  # noqa: PLC0415  # It needs the extra.

    figures = credentials(1_000)
    assert (figures["let_in"], figures["undocumented_answers"]) == (0, 0), figures["examples"]
    assert figures["requests"] == 1_000
    doors = ("http", "websocket")
    assert all(figures[f"requests_{kind}_{door}"] for kind in KINDS for door in doors)
