"""Contexts: compare and swap, chains of evaluations, and forgetting within bounds."""

from moorage.sandbox.contexts import Contexts, ToldContexts

KEY = ("digest", "t")


def test_a_swap_from_an_old_version_is_refused():
    contexts = Contexts()
    first = contexts.swap(KEY, 0, b"one")
    assert first is not None
    assert contexts.swap(KEY, 0, b"two") is None
    assert contexts.packed(KEY) == b"one"
    assert contexts.swap(KEY, first, b"x" * (257 << 10)) is None
    assert contexts.swap(KEY, first, b"three") == contexts.version(KEY)


def test_evaluations_in_one_pipe_build_on_each_other():
    contexts = Contexts()
    told = ToldContexts(contexts, "digest", 8)
    packed, forget, chain = told.tell("t")
    assert (packed, forget) == (None, False)
    again = told.tell("t")[2]
    assert again is chain
    assert told.accept("t", chain, b"one")
    assert told.accept("t", again, b"two")
    assert told.tell("t")[0] is None
    assert contexts.packed(KEY) == b"two"


def test_of_two_cells_one_wins_whole_and_the_other_is_told_anew():
    contexts = Contexts()
    one, two = (ToldContexts(contexts, "digest", 8) for _ in range(2))
    mine, other, behind = one.tell("t")[2], two.tell("t")[2], two.tell("t")[2]
    assert one.accept("t", mine, b"one")
    assert not two.accept("t", other, b"two")
    assert not two.accept("t", behind, b"two and more")
    assert contexts.packed(KEY) == b"one"
    packed, _, chain = two.tell("t")
    assert packed == b"one"
    assert two.accept("t", chain, b"one and two")


def test_a_cell_that_remembers_too_many_forgets_all_and_loses_no_change_in_the_pipe():
    contexts = Contexts()
    told = ToldContexts(contexts, "digest", 2)
    chains = {name: told.tell(name) for name in "abc"}
    assert [forget for _, forget, _ in chains.values()] == [False, False, True]
    for name, (_, _, chain) in chains.items():
        assert told.accept(name, chain, name.encode())
    packed, _, _ = told.tell("a")
    assert packed == b"a"
