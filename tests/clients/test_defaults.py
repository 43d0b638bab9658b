"""Tests of the client's defaults, and of the times that it prints for people and programs."""

import inspect
import json
import time

import pytest

from moorage.records.fields import TTL_SECONDS
from moorage.records.requests import LeaseRequest
from moorage_client import BlockingClient, Client
from moorage_client.cli.output import fields
from moorage_client.cli.publishing import _show
from moorage_client.cli.session import CommandSession
from moorage_client.workflow import LeasedPool


def test_the_default_ttl_is_the_same_in_all_clients(shell, harbour):
    assert LeaseRequest().ttl_seconds == TTL_SECONDS == 300
    for holds in (Client.lease, BlockingClient.lease, LeasedPool.__init__):
        assert inspect.signature(holds).parameters["ttl_seconds"].default == TTL_SECONDS
    assert shell("ask", "first:1-x", "--lease").returncode == 0
    assert harbour.heard[-1]["lease"]["ttl_seconds"] == TTL_SECONDS


@pytest.fixture
def in_tokyo(monkeypatch):
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_times_are_shown_in_local_time_with_its_zone(in_tokyo, capsys):
    at = 1_700_000_000.0
    fields({"granted_at": at, "history": [{"at": at + 60, "seq": 60}], "seconds": 5})
    said = capsys.readouterr().out
    assert "2023-11-15 07:13:20+09:00" in said
    assert '"at": "2023-11-15 07:14:20+09:00", "seq": 60' in said
    assert "seconds     5" in said


def test_the_command_line_leaves_out_an_unset_time(capsys):
    workload = {"retry_at": 0, "attempt": 1}
    fields({"retry_at": 0.0, "history": [{"at": 0, "seq": 1}], "seconds": 0, "workload": workload})
    shown = capsys.readouterr().out.split()
    assert shown == ["history", '[{"seq":', "1}]", "seconds", "0", "workload", '{"attempt":', "1}"]


def test_programs_read_seconds_since_the_epoch(in_tokyo, capsys):
    alias = {"alias": "first:stable", "policy_rule_uri": "first:1-x", "since": 5.0}
    CommandSession(json=True).show(alias, _show)
    assert json.loads(capsys.readouterr().out)["since"] == 5.0


def test_deeply_nested_fields_are_shown(capsys):
    nested = 7
    for _ in range(500):
        nested = [nested]
    fields({"at": nested})
    assert "7" in capsys.readouterr().out
