"""Tests of the error of a daemon that does not start as a child process."""

import pytest

from moorage.testing.daemon_process import ServerError, daemon


def test_the_error_quotes_a_daemon_that_does_not_start(tmp_path) -> None:
    with (
        pytest.raises(ServerError, match=r"did not become ready:\n.*MOORAGE_TOKENS"),
        daemon(tmp_path, environment={"MOORAGE_TOKENS": "none"}),
    ):
        pass
