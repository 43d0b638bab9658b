"""Each example in the README of slot pools runs, and the README has each public name."""

import doctest
import re
from pathlib import Path

import pytest

import moorage.slots
from moorage.slots import NodeResourcePool, ResourcePool

README = Path(moorage.slots.__file__).parent / "README.md"


def test_every_example_works_as_described():
    text = re.sub(r"^```.*$", "", README.read_text(), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, README.name, str(README), 0)
    assert len(test.examples) > 20
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0


@pytest.mark.parametrize("pool", [ResourcePool, NodeResourcePool])
def test_the_readme_names_every_method_of_a_pool(pool):
    methods = [name for name in vars(pool) if not name.startswith("_")]
    few = {"types", "nodes", "empty"}  # Their names explain them.
    assert [name for name in methods if name not in few and name not in README.read_text()] == []
