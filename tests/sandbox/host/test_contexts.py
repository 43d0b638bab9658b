"""Tests of contexts: compare and swap, chains of evaluations, and bounds."""

import msgspec
import pytest

from moorage.sandbox.host.contexts import Contexts, SentContexts
from moorage.sandbox.wire import frames

KEY = ("digest", "t")


def test_a_swap_of_a_context_from_an_old_version_is_refused():
    contexts = Contexts()
    first = contexts.swap(KEY, 0, b"one")
    assert first is not None
    assert contexts.swap(KEY, 0, b"two") is None
    assert contexts.packed(KEY) == b"one"
    assert contexts.swap(KEY, first, b"x" * (257 << 10)) is None
    assert contexts.swap(KEY, first, b"three") == contexts.version(KEY)


def test_the_context_of_an_evaluation_has_the_changes_of_the_evaluation_before():
    contexts = Contexts()
    sync = SentContexts(contexts, "digest", 8)
    packed, forget, chain = sync.tell("t")
    assert (packed, forget) == (None, False)
    again = sync.tell("t")[2]
    assert again is chain
    assert sync.accept("t", chain, b"one")
    assert sync.accept("t", again, b"two")
    assert sync.tell("t")[0] is None
    assert contexts.packed(KEY) == b"two"


def test_of_two_concurrent_changes_of_a_context_one_wins_completely():
    contexts = Contexts()
    one, two = (SentContexts(contexts, "digest", 8) for _ in range(2))
    mine, other, behind = one.tell("t")[2], two.tell("t")[2], two.tell("t")[2]
    assert one.accept("t", mine, b"one")
    assert not two.accept("t", other, b"two")
    assert not two.accept("t", behind, b"two and more")
    assert contexts.packed(KEY) == b"one"
    packed, _, chain = two.tell("t")
    assert packed == b"one"
    assert two.accept("t", chain, b"one and two")


def test_clearing_a_cells_contexts_loses_no_pending_change():
    contexts = Contexts()
    sync = SentContexts(contexts, "digest", 2)
    chains = {name: sync.tell(name) for name in "abc"}
    assert [forget for _, forget, _ in chains.values()] == [False, False, True]
    for name, (_, _, chain) in chains.items():
        assert sync.accept(name, chain, name.encode())
    packed, _, _ = sync.tell("a")
    assert packed == b"a"


def call(method: str, *arguments: object) -> frames.Call:
    return frames.Call(7, "context_client", method, msgspec.msgpack.encode(arguments))


def test_the_context_client_reads_and_swaps_contexts_and_gets_conflicts():
    contexts = Contexts()
    sync = SentContexts(contexts, "digest", 8)
    chain = sync.tell("t")[2]
    read = sync.answer("t", chain, call("read"))
    assert msgspec.msgpack.decode(read.value) == [0, b""]
    swapped = sync.answer("t", chain, call("swap", 0, b"one"))
    version = msgspec.msgpack.decode(swapped.value)[0]
    assert (swapped.status, version) == (0, contexts.version(KEY))
    late = sync.answer("t", chain, call("swap", 0, b"two"))
    assert (late.status, msgspec.msgpack.decode(late.value)[0]) == (409, version)
    assert contexts.packed(KEY) == b"one"
    assert sync.tell("t")[0] is None, "the cell that swapped the context has it"


def test_a_swap_by_management_reaches_the_cell_with_its_next_evaluation():
    contexts = Contexts()
    sync = SentContexts(contexts, "digest", 8)
    sync.tell("t")
    sync.answer("t", None, call("swap", 0, b"managed"))
    assert sync.tell("t")[0] == b"managed"


@pytest.mark.parametrize("said", [call("drop"), call("swap", 1), call("swap", "x", b"")])
def test_an_impossible_message_about_a_context_ends_the_cell(said):
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        SentContexts(Contexts(), "digest", 8).answer("t", None, said)


def test_changed_contexts_are_saved_once_in_order_within_limits():
    contexts = Contexts()
    keys = [("uri:1-x digest", name) for name in "abc"]
    for key in keys:
        contexts.swap(key, 0, b"12345")
    assert [key for key, _, _ in contexts.take_changes(11)] == keys[:2]
    assert contexts.take_changes(11) == [(keys[2], 3, b"12345")]
    assert contexts.take_changes(11) == []
    contexts.forget_policy("uri:1-x")
    assert contexts.take_changes(1) == [(key, 0, b"") for key in keys]
    contexts.restore([(keys[0], 0, b"own"), (keys[1], 0, b"x" * (257 << 10))], 0)
    assert (contexts.packed(keys[0]), contexts.packed(keys[1])) == (b"own", b"")
    assert contexts.take_changes(100) == []


def test_context_versions_never_decrease_after_restarts():
    before = Contexts()
    version = 0
    for _ in range(5):
        version = before.swap(KEY, version, b"one") or 0
    stored = before.take_changes(100)
    lost = before.swap(KEY, version, b"lost with the process")
    for beyond in (0, 1_000):
        contexts = Contexts()
        contexts.restore([*stored, (("digest", "old"), 0, b"noted no version")], beyond)
        assert contexts.version(KEY) == version, "the context has not changed since it was read"
        assert contexts.version(("digest", "old")) > max(version, beyond)
        changed = contexts.swap(KEY, version, b"two")
        assert changed is not None
        assert changed > max(version, beyond)
        assert contexts.swap(KEY, version, b"three") is None
        assert not beyond or contexts.swap(KEY, lost, b"four") is None
