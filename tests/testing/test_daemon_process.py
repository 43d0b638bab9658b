"""A daemon as a child: what is said where it does not start."""

import pytest

from moorage.testing.daemon_process import ServerError, daemon


def test_a_daemon_that_does_not_start_is_quoted(tmp_path) -> None:
    with (
        pytest.raises(ServerError, match=r"did not become ready:\n.*MOORAGE_TOKENS"),
        daemon(tmp_path, environment={"MOORAGE_TOKENS": "none"}),
    ):
        pass
