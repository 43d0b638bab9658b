"""Tests of times that a person enters; a time that the clocks skip is refused."""

import time
from collections.abc import Iterator

import pytest
import typer

from moorage_client.cli.reservations import moment


@pytest.fixture(autouse=True)
def _berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("text", ["2027-03-28T02:00", "2027-03-28T02:30", "2027-03-28T02:59:59"])
def test_a_local_time_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="does not exist") as refused:
        moment(text, "--from", 0.0)
    assert "--from" in str(refused.value)
    assert "2027-03-28T01:" in str(refused.value), "the error shows the time with an offset"


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2027-03-28T01:59", 1_806_195_540),
        ("2027-03-28T03:00", 1_806_195_600),
        ("2027-03-28T02:30Z", 1_806_201_000),
        ("2027-03-28T02:30+02:00", 1_806_193_800),
        ("2027-10-31T02:30", 1_824_942_600),
    ],
)
def test_every_existing_time_is_accepted(text: str, at: int) -> None:
    assert moment(text, "--from", 0.0) == at
