"""`$regex` and LIKE match in one pass; `$regex` agrees with Python's `re`, or is refused."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.model import Code
from moorage.query import QueryError
from moorage.query.expressions import expression
from moorage.query.limits import EXPRESSION_TEXT_CHARS_MAX, PATTERN_CHARS_MAX
from moorage.query.patterns import Like

ATOMS = st.sampled_from(
    ["a", "b", "C", ".", "[ab]", "[^a]", "[a-c1-3]", r"\d", r"\W", r"\s", r"\.", "1", "ab", "-"]
)


def larger(inner):
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?", "{1,3}?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, repeats).map(lambda two: f"(?:{two[0]}){two[1]}"),
        st.tuples(st.sampled_from(["a", "b", "."]), repeats, inner).map("".join),
        inner.map(lambda one: f"^{one}"),
        inner.map(lambda one: f"{one}$"),
    )


@settings(max_examples=300)
@given(
    st.recursive(ATOMS, larger, max_leaves=8),
    st.sampled_from(["", "i"]),
    st.lists(st.text("abcABC123 .-\n", max_size=8), min_size=5, max_size=5),
)
def test_an_expression_matches_like_pythons_re(pattern, options, texts):
    ours = expression(pattern, options, "here")
    # `\Z` because Python's `$` also matches before a line feed at the end; `[` has no `$` here.
    pythons = re.compile(pattern.replace("$", r"\Z"), re.ASCII | (re.IGNORECASE if options else 0))
    for text in texts:
        matches = bool(pythons.search(text))
        assert ours.matches(text) is matches
        if matches:
            assert all(needle in text for needle in ours.needles)


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("", ["", "x"], []),
        ("^$", [""], ["x"]),
        ("^^a$$", ["a"], ["aa"]),
        ("(^|,)gpu(,|$)", ["gpu", "a,gpu", "gpu,b"], ["gpus", "egpu"]),
        ("a^b", [], ["ab", "a", "b"]),
        ("$^", [""], ["a"]),
        (r"^[\s\S]*$", ["", "x", "x\n"], []),
        ("ab+c", ["abbc", "abc"], ["ac"]),
        (r"[\]\-\\]", ["]", "-", "\\"], ["a"]),
        ("[a-]", ["a", "-"], ["b"]),
        ("^(.*a){20}$", ["ba" * 20], ["ba" * 19]),
        ("[é-ü]", ["ö"], ["a", "ÿ"]),
        ("😀+", ["x😀😀"], ["😁"]),
        ("^[^a]$", ["b", "\n", "😀"], ["a", ""]),
        ("^(a|b){2,3}$", ["ab", "bab"], ["a", "abab"]),
        ("a{0}b", ["b"], ["a"]),
    ],
)
def test_the_examples_of_expressions_match(pattern, texts, others):
    ours = expression(pattern, "", "here")
    assert [text for text in texts if not ours.matches(text)] == []
    assert [text for text in others if ours.matches(text)] == []
    assert [text for text in texts for needle in ours.needles if needle not in text] == []


@pytest.mark.parametrize(
    ("pattern", "position", "code"),
    [
        ("(a", 3, Code.BAD_MESSAGE),
        ("a)", 2, Code.BAD_MESSAGE),
        ("[a", 3, Code.BAD_MESSAGE),
        ("[]", 3, Code.BAD_MESSAGE),
        ("a]", 2, Code.BAD_MESSAGE),
        ("*a", 1, Code.BAD_MESSAGE),
        ("a|+", 3, Code.BAD_MESSAGE),
        ("a**", 3, Code.BAD_MESSAGE),
        ("^*", 2, Code.BAD_MESSAGE),
        ("[z-a]", 5, Code.BAD_MESSAGE),
        (r"[\d-z]", 6, Code.BAD_MESSAGE),
        ("a{", 3, Code.BAD_MESSAGE),
        ("a{2,1}", 3, Code.BAD_MESSAGE),
        ("a{,3}", 3, Code.BAD_MESSAGE),
        ("a{1000}", 3, Code.BAD_MESSAGE),
        ("a{²}", 3, Code.BAD_MESSAGE),
        ("\\", 2, Code.UNSUPPORTED),
        (r"(a)\1", 5, Code.UNSUPPORTED),
        (r"\bgpu", 2, Code.UNSUPPORTED),
        ("(?=a)", 2, Code.UNSUPPORTED),
        ("(?<!a)b", 2, Code.UNSUPPORTED),
        ("(?P<n>a)", 2, Code.UNSUPPORTED),
        ("(?i)a", 2, Code.UNSUPPORTED),
        ("(" * 20 + ")" * 20, 18, Code.TOO_LARGE),
    ],
)
def test_unsupported_syntax_is_refused_with_its_position(pattern, position, code):
    with pytest.raises(QueryError) as caught:
        expression(pattern, "", "q.id.$regex")
    assert (caught.value.path, caught.value.code) == ("q.id.$regex", code)
    assert f"character {position} " in caught.value.reason


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a" + "(a|b)" * 20,
        "((a{1,90}){1,90}){1,90}",
        "|".join(f"{x}.{{90}}" for x in "abcd"),
        "(x+x+)+y{99}.{99}" * 4,
    ],
)
def test_an_expensive_expression_is_refused_when_parsed(pattern):
    assert len(pattern) <= PATTERN_CHARS_MAX
    with pytest.raises(QueryError) as caught:
        expression(pattern, "", "here")
    assert caught.value.code is Code.TOO_LARGE


class Watched(str):
    """A text that counts how often each character is read."""

    __slots__ = ("reads",)

    def __new__(cls, text):
        watched = super().__new__(cls, text)
        watched.reads = 0
        return watched

    def __iter__(self):
        for character in str(self):
            self.reads += 1
            yield character

    def find(self, *arguments):
        self.reads += 1
        return str.find(self, *arguments)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "(a*)*b",
        "(.*)*x",
        "^(a|aa)+$",
        "a*" * 40 + "b",
        "(a?){30}a{30}$",
        ".*.*.*=.*",
    ],
)
def test_an_expression_reads_each_character_of_a_text_once(pattern):
    """Each expression of this test takes a backtracking matcher exponential time or worse."""
    text = Watched("a" * (EXPRESSION_TEXT_CHARS_MAX - 1) + "!")
    expression(pattern, "", "here").matches(text)
    assert text.reads <= len(text)


@pytest.mark.parametrize("pattern", ["a*" * 100 + "b", "*a" * 100 + "*b", "*" * PATTERN_CHARS_MAX])
def test_a_like_pattern_is_matched_piece_by_piece(pattern):
    text = Watched("a" * 100_000)
    Like(pattern).matches(text)
    assert text.reads <= pattern.count("a") + 1


def test_a_text_that_is_too_long_matches_no_expression():
    ours = expression("a", "", "here")
    assert ours.matches("a" * EXPRESSION_TEXT_CHARS_MAX)
    assert not ours.matches("a" * (EXPRESSION_TEXT_CHARS_MAX + 1))


def words(alphabet, longest):
    lengths = range(longest + 1)
    return ["".join(word) for n in lengths for word in itertools.product(alphabet, repeat=n)]


def test_a_like_pattern_matches_as_the_documented_regular_expression():
    texts = words("ab.", 4)
    for pattern in words("ab.*", 4):
        documented = re.compile(".*".join(map(re.escape, pattern.split("*"))))
        like = Like(pattern)
        assert [text for text in texts if like.matches(text)] == [
            text for text in texts if documented.search(text)
        ]


@given(
    st.lists(st.text("ab0-", max_size=8), max_size=30, unique=True),
    st.sampled_from(["a", "^a", "b$", "^a*b$", "(a|b){2}0", "-?0+$", "^$", ".", "^a.*0$"]),
)
def test_sorted_texts_that_are_read_together_match_like_single_texts(texts, pattern):
    texts = sorted(texts)
    table = expression(pattern, "", "x")
    shared = [0]
    for one, other in itertools.pairwise(texts):
        alike = (n for n in range(min(len(one), len(other)) + 1) if one[:n] == other[:n])
        shared.append(max(alike))
    expected = [place for place, text in enumerate(texts) if table.matches(text)]
    assert table.occurring(texts, shared) == expected


def test_a_text_that_is_too_long_is_left_out_and_its_neighbours_still_match():
    table = expression("^a+b?$", "", "x")
    texts = ["a", "a" * 5000, "a" * 5000 + "b", "aab"]
    assert table.occurring([*texts[:2], "ab"], [0, 1, 1]) == [0, 2]
    assert table.occurring(texts, [0, 1, 5000, 2]) == [0, 3]
