"""What may not stand in a source: the unfinished, the unexplained, and this machine's own paths."""

import ast
import re
from pathlib import Path

import pytest

# An exception to a check names the check and gives its reason on the line, in a second comment.
SILENCED = re.compile(r"#\s*(ruff: noqa|noqa|type: ignore|pyright: ignore|pragma: no cover)(.*)$")
REASONED = re.compile(r"^(?:\[[\w\-, ]+\]|:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)\s+#\s+.*\w{3}")
# A kind of resource that cannot be reset says so with NotImplementedError, as documented, and why.
UNFINISHED = re.compile(r"raise NotImplementedError(?!\()|\b(TODO|FIXME|XXX|HACK)\b")
# Written so that this line does not match itself.
THIS_MACHINE = re.compile(r"/wor[k]/|/far[m]/|/roo[t]/|\.librar[y]\b|/hom[e]/(?!ann\b)\w+/")


def found(pattern: re.Pattern[str], files) -> list[str]:
    return [
        f"{each.name}:{number}: {line.strip()}"
        for each in files
        for number, line in enumerate(each.lines, 1)
        if pattern.search(line)
    ]


def unexplained(files) -> list[str]:
    return [
        f"{each.name}:{number}: {line.strip()}"
        for each in files
        for number, line in enumerate(each.lines, 1)
        if (silenced := SILENCED.search(line)) and not REASONED.match(silenced[2])
    ]


def test_every_exception_to_a_check_names_it_and_its_reason(sources, tests) -> None:
    others = [each for each in tests if each.name != "tests/house/test_sources.py"]
    assert unexplained([*sources, *others]) == []


@pytest.mark.parametrize(
    ("line", "explained"),
    [
        ("x = 1  # noqa: S105  # A code, not a password.", True),
        ("x = 1  # type: ignore[arg-type]  # The stub is wrong.", True),
        ("# ruff: noqa: N818  # The names say it.", True),
        ("x = 1  # noqa: S105, S106  # Two codes, one reason.", True),
        ("x = 1  # noqa: S105", False),
        ("x = 1  # noqa", False),
        ("x = 1  # noqa  # Everything is fine.", False),
        ("x = 1  # type: ignore", False),
        ("x = 1  # type: ignore[arg-type]", False),
        ("x = 1  # pragma: no cover", False),
    ],
)
def test_what_counts_as_a_reason(mutant, line: str, explained: bool) -> None:
    assert (unexplained([mutant(line)]) == []) == explained


def test_every_rule_left_out_in_pyproject_has_its_reason(root: Path) -> None:
    lines = (root / "pyproject.toml").read_text().splitlines()
    policies = [line for line in lines if re.match(r'^    "[A-Z]+\d*",', line)]
    assert policies
    assert [line for line in policies if not re.search(r"# \S", line)] == []


def test_nothing_is_left_unfinished(sources) -> None:
    assert found(UNFINISHED, sources) == []


def test_nothing_names_this_machine(tree) -> None:
    assert found(THIS_MACHINE, tree) == []


# A computed pause of asyncio is a back-off; a fixed one waits for something, in the dark.
_NAP = re.compile(r"time\.sleep\(.*\)|asyncio\.sleep\((?!0\))[\d.]+\)")


def naps(files: list) -> list[str]:
    """Return the calls that let time pass instead of waiting for something to happen."""
    return [
        f"{each.name}:{node.lineno}: {ast.unparse(node)}"
        for each in files
        if "sleep(" in each.text
        for node in ast.walk(each.tree)
        if isinstance(node, ast.Call)
        and _NAP.fullmatch(ast.unparse(node))
        and not re.search(r"  # .*\w{3}", each.lines[node.lineno - 1])
    ]


def test_no_code_waits_by_the_clock(sources, tests) -> None:
    """Events are waited for, with a bound; who must poll says on the line why."""
    assert naps([*sources, *tests]) == []


@pytest.mark.parametrize(
    ("line", "nap"),
    [
        ("time.sleep(pause)", True),
        ("await asyncio.sleep(0.1)", True),
        ("await asyncio.sleep(0)", False),
        ("await asyncio.sleep(pause)", False),
        ("time.sleep(pause)  # flock has no timeout of its own.", False),
        ("rule = 'time.sleep(9)'", False),
    ],
)
def test_what_counts_as_waiting_by_the_clock(mutant, line: str, nap: bool) -> None:
    assert bool(naps([mutant(f"async def f():\n    {line}\n")])) == nap


# A bound against hanging is a deadline, which is written without a difference.
_TIMED = re.compile(r"^\s*assert .*\b(monotonic|perf_counter)(_ns)?\(\) - ")


def test_no_test_asserts_a_time(tests) -> None:
    """Other work on the machine decides it: `moored bench` reports times, tests count."""
    assert found(_TIMED, tests) == []


@pytest.mark.parametrize(
    ("line", "timed"),
    [
        ("    assert time.monotonic() - began < 15", True),
        ("    assert 0 < perf_counter_ns() - began < 1", True),
        ("    assert time.monotonic() < deadline", False),
    ],
)
def test_what_counts_as_asserting_a_time(mutant, line: str, timed: bool) -> None:
    assert bool(found(_TIMED, [mutant(line)])) == timed


def unsafe_children(files) -> list[str]:
    """Return the starts of Python that would import a `random.py` beside the user's policies."""
    return [
        f"{each.name}:{node.lineno}: {ast.unparse(node)}"
        for each in files
        if "sys.executable" in each.text
        for node in ast.walk(each.tree)
        if isinstance(node, ast.List | ast.Tuple)
        and re.search(
            r"sys\.executable(?! or), (?!'-[PI]'|\*ISOLATED)['*\w]", ast.unparse(node).strip("()[]")
        )
    ]


def test_no_child_imports_from_the_working_directory(sources) -> None:
    """It is the user's, and may hold policies that are called like modules of Python's own."""
    ours = [each for each in sources if each.name.startswith(("server/", "clients/"))]
    assert unsafe_children(ours) == []


@pytest.mark.parametrize(
    ("command", "unsafe"),
    [
        ("[sys.executable, '-m', 'moorage']", True),
        ("('nice', '-n', '10', sys.executable, '-m', 'moorage')", True),
        ("[sys.executable, name]", True),
        ("[sys.executable, '-P', '-m', 'moorage']", False),
        ("[sys.executable, '-I', '-S', name]", False),
        ("[sys.executable, *ISOLATED, '-c', text]", False),
        ("(sys.executable, [sys.executable, '-I', name], {})", False),
    ],
)
def test_what_counts_as_importing_from_the_working_directory(mutant, command, unsafe) -> None:
    assert bool(unsafe_children([mutant(f"command = {command}")])) == unsafe


def test_every_module_says_what_it_is(sources) -> None:
    silent = [each.name for each in sources if not ast.get_docstring(each.tree)]
    assert silent == []


def test_modules_are_named_by_nouns(sources) -> None:
    vague = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [each.name for each in sources if Path(each.name).name in vague] == []


def test_no_test_checks_nothing(tests) -> None:
    """It calls or asserts something, and what it asserts is no constant."""
    idle = [
        f"{each.name}:{node.lineno}: {node.name}"
        for each in tests
        for node in ast.walk(each.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and _checks_nothing(node)
    ]
    assert idle == []


def _checks_nothing(node: ast.AST) -> bool:
    asserts = [each.test for each in ast.walk(node) if isinstance(each, ast.Assert)]
    calls = any(isinstance(each, ast.Call) for each in ast.walk(node))
    return any(isinstance(test, ast.Constant) for test in asserts) or not (asserts or calls)


@pytest.mark.parametrize(
    ("body", "nothing"),
    [("pass", True), ("assert True", True), ("assert f()", False), ("f().check()", False)],
)
def test_what_counts_as_checking_nothing(mutant, body: str, nothing: bool) -> None:
    assert _checks_nothing(mutant(f"def test_x():\n    {body}\n").tree) == nothing


def open_ends(files: list) -> list[str]:
    """Return the `case _` that neither close a union nor say why the values are open."""
    return [
        f"{each.name}:{node.cases[-1].pattern.lineno}"
        for each in files
        if "case _" in each.text
        for node in ast.walk(each.tree)
        if isinstance(node, ast.Match) and not _closed_or_explained(node.cases[-1], each.lines)
    ]


def _closed_or_explained(case: ast.match_case, lines: list[str]) -> bool:
    if case.guard or not (isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None):
        return True
    closed = ast.unparse(case.body[0]).startswith("assert_never(")
    return closed or re.search(r"  # .*\w{3}", lines[case.pattern.lineno - 1]) is not None


def test_a_match_closes_its_union_or_says_why_it_is_open(sources) -> None:
    others = [each for each in sources if not each.name.startswith("server/moorage/daemon/")]
    assert open_ends(others) == []


@pytest.mark.parametrize(
    ("end", "is_open"),
    [
        ("case _:\n            pass", True),
        ("case _:\n            return 0", True),
        ("case _:\n            assert_never(x)", False),
        ("case _:  # Users add kinds of their own.\n            pass", False),
        ("case _ if x > 2:\n            pass", False),
        ("case 2:\n            pass", False),
    ],
)
def test_what_counts_as_an_open_end(mutant, end: str, is_open: bool) -> None:
    source = f"def f(x):\n    match x:\n        case 1:\n            pass\n        {end}\n"
    assert bool(open_ends([mutant(source)])) == is_open
