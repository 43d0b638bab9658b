"""The examples in the README of slices run on a real Ray, and the README has each public name."""

import doctest
import re
from pathlib import Path

import pytest

import moorage.slices
from moorage.slices import RayExecutor, SlicePoolManager, SliceSettings
from moorage.slices.settings import NAMES

README = Path(moorage.slices.__file__).parent / "README.md"


@pytest.mark.heavy
@pytest.mark.ray
def test_every_example_works_as_described(ready, monkeypatch):
    monkeypatch.setenv("EFORMER_HOST_HEALTH_WAIT_S", "30")
    text = re.sub(r"^```.*$", "", README.read_text(), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, README.name, str(README), 0)
    assert len(test.examples) > 20
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0


@pytest.mark.parametrize("of", [SlicePoolManager, RayExecutor])
def test_the_readme_names_every_method(of):
    methods = [name for name in vars(of) if not name.startswith("_")]
    aliases = {"autoscale_execute", "autoscale_execute_resumable"}
    assert [
        name for name in methods if name not in README.read_text() and name not in aliases
    ] == []


def test_every_setting_is_listed_with_its_default():
    text = README.read_text()
    for name, suffix in NAMES.items():
        called = suffix if suffix == "COORD_PORT" else f"EFORMER_{suffix}"
        assert f"| `{called}` | {int(getattr(SliceSettings(), name))} |" in text
