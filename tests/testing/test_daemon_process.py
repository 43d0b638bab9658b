"""A daemon as a child: what is said where it does not start."""

import pytest

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon


def test_a_daemon_that_does_not_start_is_quoted(tmp_path) -> None:
    with (
        pytest.raises(CommandError, match=r"did not become ready:\n.*MOORAGE_TOKENS"),
        daemon(tmp_path, environment={"MOORAGE_TOKENS": "none"}),
    ):
        pass
