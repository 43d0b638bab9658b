"""Each law of the simulation kills a mutant of the core.

A mutant is one function of the core, changed in place while a world is played. A mutant that
survives shows that no law notices its fault.
"""

import ast
import re
import traceback

import pytest
from mutated.edits import Body, DoesNotApply, Edit, Function, Replace
from mutated.functions import find, play_mutant
from mutated.mutants import MUTANTS, Mutant
from simulated.laws import LawBroken
from simulated.world import EVENTS, World, run

from moorage.core.turns.turn import Turn

SEEDS = 500
"""Number of further seeds to play if a mutant survives the seed that should kill it."""


def death(mutant: Mutant) -> Exception | None:
    """Play a mutant; return the error that kills it."""
    with play_mutant(mutant.of, mutant.edit):
        for seed in range(mutant.seed, mutant.seed + SEEDS):
            try:
                run(seed, EVENTS)
            except Exception as error:  # noqa: BLE001  # Any error shows the fault.
                if seed != mutant.seed:
                    print(f"{mutant.name}: dies of seed {seed}, and not of {mutant.seed} any more")
                return error
    return None


def is_noticed(mutant: Mutant, error: Exception) -> bool:
    """Return whether any law was broken, or the core raised the error that the mutant names."""
    story = "".join(traceback.format_exception(error))
    return isinstance(error, LawBroken) or re.search(mutant.verdict, story) is not None


def name_of(mutant: Mutant) -> str:
    return mutant.name


@pytest.mark.heavy
@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_the_laws_notice_each_mutant(mutant: Mutant) -> None:
    error = death(mutant)
    assert error is not None, f"survived {SEEDS} seeds: the laws do not notice"
    if not is_noticed(mutant, error):
        raise error


def test_names_of_mutants_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 114


class Renamed(ast.NodeTransformer):
    """Renames the local variables of a function, except its parameters."""

    def __init__(self, function: Function) -> None:
        nodes = list(ast.walk(function))
        stored = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        stored |= {x.name for x in nodes if isinstance(x, ast.MatchAs) and x.name}
        self._names = stored - {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)}

    def _new(self, name: str) -> str:
        return f"{name}_renamed" if name in self._names else name

    def visit_Name(self, node: ast.Name) -> ast.Name:  # The visitor's protocol.
        return ast.Name(self._new(node.id), node.ctx)

    def visit_MatchAs(self, node: ast.MatchAs) -> ast.MatchAs:  # As above.
        self.generic_visit(node)
        return ast.MatchAs(node.pattern, node.name and self._new(node.name))


def names_a_local_variable(name: str, edit: Edit) -> bool:
    """Return whether an edit changes a function differently after its variables are renamed."""
    _, function = find(name)
    renamed = Renamed(function)
    edit.once(function, name)
    expected = ast.dump(renamed.visit(function))

    _, function = find(name)
    function = renamed.visit(function)
    return edit.apply(function) != 1 or ast.dump(function) != expected


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_a_mutant_depends_on_no_local_variable(mutant: Mutant) -> None:
    assert not names_a_local_variable(mutant.of, mutant.edit)


@pytest.mark.parametrize(
    "edit", [Replace("lease.granted_at", "0.0"), Replace("_.granted_at", "lease.asked_at")]
)
def test_an_edit_that_names_a_local_variable_is_found(edit: Edit) -> None:
    assert names_a_local_variable("Preemption._who_may", edit)


def test_the_edit_of_a_mutant_is_removed_after_its_play() -> None:
    """A mutant must take effect while it is played, and must not affect the mutants after it."""
    edit = Body("raise SystemExit('the mutant was played')")
    with pytest.raises(SystemExit, match="was played"), play_mutant("Allocator.step", edit):
        run(0, 5)
    run(0, 5)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Allocator.stride", "ends in Allocator.stride; found: none"),
        ("_shares", r"found: moorage.*, moorage\."),
    ],
)
def test_the_error_names_a_missing_function(name: str, complaint: str) -> None:
    with pytest.raises(DoesNotApply, match=complaint), play_mutant(name, Body("pass")):
        pass


class Hasty(World):
    """A daemon that releases effects before their facts are durable."""

    def step(self, event):
        turn = super().step(event)
        if turn in self.turns:
            self.turns.remove(turn)
            self.turns.append(Turn(turn.facts, []))
            self.let_go([turn])
        return turn


class Forgetful(World):
    """A disk that confirms writes that it has not made."""

    def commit(self) -> None:
        before = len(self.ledger)
        super().commit()
        if len(self.ledger) > before and self.rng.random() < 0.2:
            del self.ledger[before:]


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (Hasty, "is durable|leases are those of the ledger"),
        (
            Forgetful,
            (
                "each lease known to a client exists after a restart|is durable|"
                "leases are those of the ledger|ledger gives the live state|"
                "no lower-ranking lease gets the head's|a lease keeps its (token|placement)|"
                "capacity is renewed|only grace renews leases"
            ),
        ),
    ],
)
def test_a_simulated_world_with_a_defect_breaks_a_law(kind: type[World], verdict: str) -> None:
    def play_all() -> None:
        for seed in range(1, 60):  # In world 0, an assertion of the core is first.
            run(seed, 200, kind)

    with pytest.raises(LawBroken, match=verdict):
        play_all()
