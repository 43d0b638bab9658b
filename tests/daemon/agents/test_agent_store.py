"""Tests of the store of agents: processes see each other's changes, and a join reads one row."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moorage.daemon.agents.agent_store import (
    AgentOrigin,
    AgentRecord,
    AgentStore,
    AgentStoreError,
    JoiningToken,
)
from moorage.model import ClusterId, NodeId
from moorage.storage.sqlite.storage import SqliteStorage

NOW = 1_763_647_000.0
SHOWN = AgentOrigin("10.0.0.1", "1.0", 0.0, NOW)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[], AgentStore]:
    return lambda: AgentStore(SqliteStorage(tmp_path).agents())


def join(store: AgentStore, name: str) -> str:
    """Let a machine join; return the key of its agent."""
    token = store.find(store.create_token("lab", NOW, NOW + 600), NOW)
    assert isinstance(token, JoiningToken)
    place = ClusterId("lab"), NodeId(name)
    return store.join(token, place, name, SHOWN)


def test_a_change_of_agents_by_one_process_is_seen_by_another_process(
    opened: Callable[[], AgentStore],
) -> None:
    with closing(opened()) as server, closing(opened()) as command:
        keys = {name: join(store, name) for name, store in (("a", server), ("b", command))}
        keys |= {name: join(store, name) for name, store in (("c", command), ("d", server))}
        for store in (server, command):
            assert {each.node_id for each in store.agents().values()} == set("abcd")
            assert all(each.connected for each in store.agents().values())
            for name, key in keys.items():
                found = store.find(key, NOW)
                assert isinstance(found, AgentRecord)
                assert found.node_id == name
        command.revoke("lab/a")
        assert server.find(keys["a"], NOW) is None
        server.note_disconnection(None, NOW)
        assert not any(each.connected for each in command.agents().values())
        command.forget("lab/b")
        assert server.find(keys["b"], NOW) is None
        with pytest.raises(AgentStoreError, match="lab/b"):
            server.forget("lab/b")
        assert command.reclaim(NOW) == server.reclaimed() == int(NOW)


def test_a_replaced_server_does_not_disconnect_an_agent_of_its_successor(
    opened: Callable[[], AgentStore],
) -> None:
    with closing(opened()) as replaced, closing(opened()) as leader:
        join(replaced, "a")
        place = ClusterId("lab"), NodeId("a")
        leader.note_disconnection(None, NOW + 1)
        leader.note_connection(place, SHOWN._replace(changed_at=NOW + 2))
        replaced.note_disconnection((place, NOW), NOW + 3)
        assert leader.agents()[place].connected
        with pytest.raises(AgentStoreError, match="is connected"):
            replaced.forget("lab/a")
        leader.note_disconnection((place, NOW + 2), NOW + 4)
        assert not replaced.agents()[place].connected


def test_a_machine_that_joins_causes_no_read_of_other_machines(
    opened: Callable[[], AgentStore],
) -> None:
    with closing(opened()) as store, closing(opened()) as command:
        for name in "ab":
            join(store, name)
        before = dict(store.agents())
        join(store, "c")
        join(command, "d")
        after = store.agents()
        assert len(after) == len(before) + 2
        assert all(after[place] is record for place, record in before.items())


def test_a_change_of_agents_that_fails_changes_nothing(opened: Callable[[], AgentStore]) -> None:
    with closing(opened()) as store:
        token = store.find(store.create_token("lab", NOW, NOW + 600), NOW)
        assert isinstance(token, JoiningToken)
        for name in "ab":
            place = ClusterId("lab"), NodeId(name)
            if name == "a":
                store.join(token, place, name, SHOWN)
            else:
                with pytest.raises(AgentStoreError, match="was used by another agent"):
                    store.join(token, place, name, SHOWN)
        with closing(opened()) as other:
            assert store.agents() == other.agents()
            assert [each.node_id for each in store.agents().values()] == ["a"]
