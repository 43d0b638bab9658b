"""The index agrees with `evaluate` about every document, after every change."""

import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.model import Code
from moorage.query import DocumentIndex, QueryError, evaluate, parse_condition, parse_mongo
from moorage.query.index import ROWS_AT_FIRST, SCAN_MAX
from moorage.query.limits import SEARCH_CHARS_MAX

NAMES = st.sampled_from(["a", "b", "nodes", "node", "load5m", "load_5m", "a.b", "0"])
TEXTS = st.sampled_from(["", "a", "ab", "abc", "b*", "4", "4.0", "a\0b", "\0", "é", "zz", "\ud800"])
NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**53 + 1, -(2**53) - 1, 2**60, 10**30, 0.5, -0.0, 4.0, 1e308]),
)
SCALARS = st.one_of(st.none(), st.booleans(), TEXTS, NUMBERS)
ODD = st.sampled_from([float("nan"), float("inf"), float("-inf"), 10**400])
VALUES = st.recursive(
    SCALARS | ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)

PATHS = st.lists(st.sampled_from(["a", "b", "nodes", "load5m", "0", "1"]), min_size=1, max_size=3)
STRUCTURES = st.lists(SCALARS, max_size=2) | st.dictionaries(NAMES, SCALARS, max_size=2)
OPERANDS = SCALARS | STRUCTURES
ORDERED = TEXTS | NUMBERS
REGEXES = st.sampled_from(["a", "^a", "b$", "[ab]c?", "^.?$", "a.*b", "^[^a]", r"^\d", "ab+c"])


@st.composite
def leaves(draw):
    variable = ".".join(draw(PATHS))
    operator = draw(st.sampled_from(["==", "!=", "IN", "<", "<=", ">", ">=", "LIKE"]))
    if draw(st.booleans()):
        mongo = draw(
            st.one_of(
                st.fixed_dictionaries({"$exists": st.booleans()}),
                st.fixed_dictionaries({"$regex": REGEXES}),
                st.fixed_dictionaries({"$nin": st.lists(OPERANDS, max_size=3)}),
                st.fixed_dictionaries({"$gt": ORDERED, "$lte": ORDERED}),
                st.fixed_dictionaries({"$not": st.fixed_dictionaries({"$lt": ORDERED})}),
            )
        )
        return parse_mongo({variable: mongo})
    if operator != "LIKE" and draw(st.booleans()):
        how = draw(st.sampled_from(["count", "avg", "sum", "min", "max"]))
        value = draw(st.lists(NUMBERS, max_size=3) if operator == "IN" else NUMBERS)
        query = {"aggOperator": how, "target": variable, "operator": operator, "value": value}
        return parse_condition(query)
    kinds = {"==": OPERANDS, "!=": OPERANDS, "IN": st.lists(OPERANDS, max_size=4)}
    kinds["LIKE"] = st.sampled_from(["", "*", "a", "a*b", "b*", "*c", "\0", "z*z"])
    query = {"variable": variable, "operator": operator}
    return parse_condition({**query, "value": draw(kinds.get(operator, ORDERED))})


def join(inner):
    # `parse` can make any tree; this strategy combines parsed leaves directly.
    from moorage.query.conditions import AllOf, AnyOf, Not  # noqa: PLC0415  # The only use.

    several = st.lists(inner, max_size=3).map(tuple)
    return st.one_of(several.map(AllOf), several.map(AnyOf), inner.map(Not))


CONDITIONS = st.recursive(leaves(), join, max_leaves=6)


def agrees(index, documents, condition):
    expected = sorted(key for key, document in documents.items() if evaluate(condition, document))
    assert index.matching(condition) == expected


@pytest.mark.heavy
@settings(max_examples=150)
@given(
    st.lists(DOCUMENTS, min_size=1, max_size=5),
    st.lists(
        st.one_of(CONDITIONS, st.tuples(st.integers(0, 60), DOCUMENTS), st.integers(0, 60)),
        min_size=1,
        max_size=8,
    ),
)
def test_the_index_agrees_with_evaluate(kinds, happenings):
    """The test evaluates conditions between additions and removals, and each again at the end."""
    # More documents than are evaluated one by one; otherwise no column is built.
    documents = {f"d{n}": kinds[n % len(kinds)] for n in range(SCAN_MAX + 8)}
    index = DocumentIndex(columns_max=4)
    for key, document in documents.items():
        index.put(key, document)
    for happening in happenings:
        match happening:
            case int():
                assert index.remove(f"d{happening}") is (f"d{happening}" in documents)
                documents.pop(f"d{happening}", None)
            case (number, document):
                index.put(f"d{number}", document)
                documents[f"d{number}"] = document
            case _:
                agrees(index, documents, happening)
    for condition in happenings:
        if not isinstance(condition, (int, tuple)):
            agrees(index, documents, condition)
    assert len(index) == len(documents)


HUGE = 2**53
# Every kind of value, alone and in lists, with its neighbours in the order.
POOL = [
    *(None, True, False, 0, 1, -1, 4, 4.0, 4.5, "4", "4.0", "", "a", "b", "aa", "ab", "ba", "abc"),
    *(HUGE - 1, HUGE, HUGE + 1, HUGE + 2, float(HUGE), -HUGE - 1, 10**30, 10**400, float("nan")),
    *(
        [],
        [1],
        [1, 2],
        [2, 1],
        [1, 1.0, "1", True],
        [1, True],
        [False, 0],
        [[1, 2], 3],
        [{"b": 1}],
        ["a", "b"],
        [None],
    ),
    *(
        [HUGE + 1, 1],
        [{"b": 1}, {"b": True}],
        {"b": 1},
        {"b": 1.0},
        {"b": True},
        {"b": 1, "c": 2},
        {"b": [1, 2]},
        {},
    ),
    *("a\0", "\0a", "a\0b", "é", "\ud800", ["ab", "abc", 4, None], list(range(9)), "zzz"),
]
OPERANDS_POOL = [value for value in POOL if value == value and value != 10**400]  # noqa: PLR0124  # NaN is not.


def all_conditions():
    """Yield a condition for each operator, path and operand."""
    for path in ("a", "a.b", "a.0"):
        yield {path: {"$exists": True}}
        for operand in OPERANDS_POOL:
            yield {path: {"$eq": operand}}
            yield {path: {"$nin": [operand, "abc", 3]}}
            if isinstance(operand, (str, int, float)) and not isinstance(operand, bool):
                yield from ({path: {name: operand}} for name in ("$gt", "$gte", "$lt", "$lte"))
        for pattern in ("a", "^a", "b$", "^.?$", "ab+c", "^[^a]", "a.*b"):
            yield {path: {"$regex": pattern}}
        for pattern in ("a", "b", "a*b", "*", "a*a", "\0", "zz", "a\0a"):
            yield {"variable": path, "operator": "LIKE", "value": pattern}
        for how in ("count", "avg", "sum", "min", "max"):
            for operator in ("==", "<", ">="):
                for value in (0, 1, 3, HUGE + 1):
                    fold = {"aggOperator": how, "target": path}
                    yield {**fold, "operator": operator, "value": value}


ASKED = [parse_condition(query) for query in all_conditions()]


@pytest.mark.heavy
def test_the_index_agrees_with_evaluate_after_every_change():
    assert len(ASKED) > 500
    assert len(POOL) > SCAN_MAX
    documents = {f"d{n:03}": {"a": value} for n, value in enumerate(POOL)} | {"none": {}}
    index = DocumentIndex()
    for turn in range(4):
        for key, document in documents.items():
            index.put(key, document)
        for condition in ASKED:
            agrees(index, documents, condition)
        # All documents swap values; some are removed or added, one has values of its own.
        values = list(documents.values())
        documents = dict(zip(documents, values[7:] + values[:7], strict=True))
        for key in list(documents)[turn::9]:
            del documents[key]
            index.remove(key)
        documents |= {f"e{turn}{n}": {"a": value} for n, value in enumerate(POOL[turn::6])}
        documents[f"own{turn}"] = {"a": ["own", f"own{turn}", turn + 0.25, turn + 0.75]}


@pytest.mark.parametrize("needle", ["own", "ow*n0", "x", "aa", "a", ""])
def test_a_like_pattern_matches_at_the_borders_of_adjacent_texts(needle):
    """Few of many texts match; the index searches all texts joined together."""
    index = DocumentIndex()
    documents = {f"t{n:03}": {"t": f"{n:03}"} for n in range(200)}
    tails = ["own", "own0", "aown1", "a", "aa", "x", "xx", "o", "w", "n0"]
    documents |= {f"u{text}": {"t": text} for text in tails}
    for key, document in documents.items():
        index.put(key, document)
    condition = parse_condition({"variable": "t", "operator": "LIKE", "value": needle})
    agrees(index, documents, condition)
    for key in ("uown", "uaa"):
        index.remove(key)
        del documents[key]
    documents["new"] = {"t": "brown0"}
    index.put("new", documents["new"])
    agrees(index, documents, condition)


def fill_index(number):
    index = DocumentIndex()
    for n in range(number):
        document = {"n": n, "id": f"c{n:04}", "gpus": [n, n + 1, n + 2], "tags": ["x", f"t{n % 7}"]}
        index.put(f"c{n:04}", document)
    return index


def test_documents_can_be_put_into_the_index_and_read_and_removed():
    index = fill_index(3)
    assert sorted(index) == ["c0000", "c0001", "c0002"]
    assert "c0001" in index
    assert index.get("c0001")["n"] == 1
    assert index.remove("c0001") is True
    assert index.remove("c0001") is False
    assert ("c0001" in index, index.get("c0001"), len(index)) == (False, None, 2)


def test_answers_of_the_index_are_in_the_order_of_the_ids():
    index = DocumentIndex()
    for key in ["c", "a", "b"]:
        index.put(key, {"n": 1})
    assert index.matching(parse_mongo({"n": 1})) == ["a", "b", "c"]


def test_the_index_grows_while_columns_are_in_use():
    index = fill_index(ROWS_AT_FIRST)
    condition = parse_mongo({"gpus": ROWS_AT_FIRST + 1, "id": {"$regex": "^c"}})
    assert len(index.matching(condition)) == 1
    for n in range(ROWS_AT_FIRST, 10 * ROWS_AT_FIRST):
        index.put(f"c{n:04}", {"id": f"c{n}", "gpus": [ROWS_AT_FIRST + 1]})
    assert len(index.matching(condition)) == 1 + 9 * ROWS_AT_FIRST


def test_the_index_drops_the_least_recently_used_column():
    index = DocumentIndex(columns_max=2)
    for n in range(100):
        index.put(str(n), {"a": n, "b": n, "c": n})
    for path in ("a", "b", "a", "c"):
        assert index.matching(parse_mongo({path: 7})) == ["7"]
    assert [source.text for source in index._columns] == ["a", "c"]


def test_the_total_number_of_values_in_the_index_is_limited():
    index = DocumentIndex(cells_max=2000)
    for n in range(100):
        index.put(str(n), {"a": n, "b": list(range(n, n + 50))})
    for path in ("a", "b", "a"):
        assert "7" in index.matching(parse_mongo({path: 7}))
    assert [source.text for source in index._columns] == ["a"]


def test_replacing_a_document_repeatedly_needs_no_more_space():
    index = fill_index(100)
    condition = parse_mongo({"gpus": {"$gte": 0}, "tags": "x"})
    index.matching(condition)
    sizes = []
    for turn in range(20):
        for n in range(100):
            index.put(f"c{n:04}", {"gpus": list(range(turn % 5 + n % 3)), "tags": [f"t{turn}"]})
        index.matching(condition)
        sizes.append(sum(stored.column.size for stored in index._columns.values()))
    assert max(sizes) <= 3 * min(sizes)
    (stored,) = (stored for source, stored in index._columns.items() if source.text == "gpus")
    assert stored.column.size < 20 * 100
    (tags,) = (stored for source, stored in index._columns.items() if source.text == "tags")
    assert set(tags.column._codes) == {"t19"}


def test_the_index_evaluates_few_documents_without_a_column():
    index = fill_index(100)
    query = {"$and": [{"rare.path": None}, {"n": {"$lt": SCAN_MAX}}]}
    index.matching(parse_mongo({"n": 1}))
    assert len(index.matching(parse_mongo(query))) == SCAN_MAX
    assert [source.text for source in index._columns] == ["n"]


@pytest.mark.parametrize("changing", [False, True])
def test_the_cost_of_a_query_depends_on_its_hits_only(changing):
    """The test measures CPU time; a query that reads each document would take 100 times as long."""
    condition = parse_mongo({"tag": "wanted", "gpus": {"$gte": 4}, "region": {"$regex": "^eu-"}})
    taken = []
    for count in (100, 10_000):
        index, seconds = DocumentIndex(), []
        for n in range(count):
            tag = "wanted" if n < 10 else f"team-{n % 50}"
            index.put(f"{n:05}", {"tag": tag, "gpus": 8, "region": f"eu-{n % 7}", "load": n})
        for n in range(50):
            if changing:
                index.put("00003", {"tag": "wanted", "gpus": 8, "region": "eu-3", "load": -n})
            began = time.thread_time()
            found = index.matching(condition)
            seconds.append(time.thread_time() - began)
            assert len(found) == 10
        taken.append(statistics.median(seconds))
    few, many = taken
    print(f"{many / few:.1f} times")
    assert many <= 20 * few


def test_an_expression_that_would_read_too_much_is_refused_with_its_place():
    index = DocumentIndex()
    length = 4000
    for n in range(SEARCH_CHARS_MAX // length + 2):
        index.put(str(n), {"text": f"{n:06}" + "x" * (length - 6)})
    with pytest.raises(QueryError) as caught:
        index.matching(parse_mongo({"text": {"$regex": "^[0-9]+[7-8]x*$"}, "n": None}, "filter"))
    assert (caught.value.path, caught.value.code) == ("filter.text.$regex", Code.TOO_LARGE)
    # A fixed text in the pattern leaves little to read.
    assert index.matching(parse_mongo({"text": {"$regex": "^0*7x"}})) != []
    assert index.matching(parse_mongo({"text": {"$regex": "^[0-9]+000017x"}})) == []
