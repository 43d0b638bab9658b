"""The daemon is built in one phase, of parts that each need little."""

import ast
from collections.abc import Iterator

import pytest

DAEMON = "server/moorage/daemon/"
CONSTRUCTOR_ARGUMENTS_MAX = 6
DAEMON_LINES_MAX = 250


def is_record(node: ast.ClassDef) -> bool:
    """Tell whether a class declares fields: a dataclass, a struct, a tuple, or a Protocol."""
    named = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return any(
        name.startswith(("dataclass", "msgspec.Struct", "NamedTuple", "Protocol")) for name in named
    )


def constructors(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every class with a constructor of its own, and how many arguments that takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    given = each.args
                    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                    yield node.name, len(arguments) - 1


def declared_before(tree: ast.Module) -> Iterator[str]:
    """Yield attributes that are declared before they exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bodies = [node.body] if not is_record(node) else []
            bodies += [each.body for each in node.body if isinstance(each, ast.FunctionDef)]
            for each in (statement for body in bodies for statement in body):
                if isinstance(each, ast.AnnAssign) and each.value is None:
                    yield f"{node.name}.{ast.unparse(each.target)}"


def bare_cases(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of `case _` that neither refuse statically nor follow foreign JSON."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Match):
            last = node.cases[-1]
            is_bare = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
            if is_bare and "assert_never" not in ast.unparse(last.body[0]):
                yield last.pattern.lineno


def test_no_constructor_of_the_daemon_takes_more_than_six_arguments(sources) -> None:
    greedy = {
        f"{source.name}:{name}": count
        for source in sources
        if source.name.startswith(DAEMON)
        for name, count in constructors(source.tree)
        if count > CONSTRUCTOR_ARGUMENTS_MAX
    }
    assert greedy == {}


def test_no_attribute_of_the_daemon_is_declared_before_it_exists(sources) -> None:
    early = [
        f"{source.name}:{name}"
        for source in sources
        if source.name.startswith(DAEMON)
        for name in declared_before(source.tree)
    ]
    assert early == []


def test_matches_of_the_daemon_are_closed_or_say_what_they_leave_open(sources) -> None:
    bare = [
        f"{source.name}:{line}"
        for source in sources
        if source.name.startswith(DAEMON)
        for line in bare_cases(source.tree)
        if "  # " not in source.lines[line - 1]
    ]
    assert bare == []


def too_long(lines: list[str]) -> bool:
    return len(lines) > DAEMON_LINES_MAX


def test_the_daemon_itself_stays_small(sources) -> None:
    daemon = next(each for each in sources if each.name == f"{DAEMON}daemon.py")
    assert not too_long(daemon.lines)


@pytest.mark.parametrize(("lines", "seen"), [(250, False), (251, True)])
def test_a_daemon_that_grew_is_seen(mutant, lines: int, seen: bool) -> None:
    assert too_long(mutant("pass\n" * lines).lines) is seen


@pytest.mark.parametrize(("keywords", "greedy"), [(2, False), (3, True)])
def test_a_constructor_of_seven_is_seen(mutant, keywords: int, greedy: bool) -> None:
    more = ", ".join(f"k{number}" for number in range(keywords))
    source = mutant(f"class A:\n    def __init__(self, a, b, c, d, *, {more}):\n        pass\n")
    assert [count > CONSTRUCTOR_ARGUMENTS_MAX for _, count in constructors(source.tree)] == [greedy]


@pytest.mark.parametrize(
    ("text", "early"),
    [
        ("class A:\n    def __init__(self):\n        self.late: int\n", ["A.self.late"]),
        ("class A:\n    late: int\n", ["A.late"]),
        ("class A:\n    def __init__(self):\n        self.now: int = 1\n", []),
        ("@dataclass(frozen=True)\nclass A:\n    field: int\n", []),
        ("class A(Protocol):\n    field: int\n", []),
    ],
)
def test_an_attribute_without_a_value_is_seen(mutant, text: str, early: list[str]) -> None:
    assert list(declared_before(mutant(text).tree)) == early


@pytest.mark.parametrize(
    ("body", "bare"), [("assert_never(x)", []), ("raise TypeError(x)", [4]), ("return x", [4])]
)
def test_a_match_that_is_left_open_is_seen(mutant, body: str, bare: list[int]) -> None:
    text = f"match x:\n    case A():\n        pass\n    case _:\n        {body}\n"
    assert list(bare_cases(mutant(text).tree)) == bare
