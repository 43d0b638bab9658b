"""Each example in the README of resources runs, and the README has each public name."""

import asyncio
import doctest
import re
from pathlib import Path

import pytest

import moorage.resources
from moorage.backends.local.backend import LocalBackend
from moorage.resources import ResourceEngine
from moorage.resources.runners import LocalRunner

README = Path(moorage.resources.__file__).parent / "README.md"
CONTAINERS = "## Containers"
SECTIONS = re.split(
    r"^(?=## )", re.sub(r"^```.*$", "", README.read_text(), flags=re.MULTILINE), flags=re.MULTILINE
)


def play(text: str) -> int:
    """Run the examples of a text; return their number."""
    first = "import asyncio; from moorage.resources import ResourceEngine"
    test = doctest.DocTestParser().get_doctest(f">>> {first}\n\n{text}", {}, README.name, None, 0)
    assert doctest.DocTestRunner().run(test).failed == 0
    return len(test.examples)


def test_every_example_works_as_described():
    rest = [each for each in SECTIONS if not each.startswith(CONTAINERS)]
    assert play("".join(rest)) > 15


@pytest.mark.heavy
def test_the_container_examples_work_as_described(shell_image, tmp_path, monkeypatch):
    backend = LocalBackend(tmp_path, outlive=False)
    engine = ResourceEngine({"local": LocalRunner(backend)})
    monkeypatch.setattr(ResourceEngine, "_shared", engine)
    (section,) = (each for each in SECTIONS if each.startswith(CONTAINERS))
    assert play(section.replace("ubuntu:22.04", shell_image)) > 3
    asyncio.run(backend.close())  # Its thread would outlive the tests' container engine.


def test_every_method_and_public_name_is_in_the_readme():
    text = README.read_text()
    methods = [name for name in vars(ResourceEngine) if not name.startswith("_")]
    few = {"EngineClosedError", "UnknownWorkloadError", "UnsupportedSpecError", "CommandOutput"}
    assert [name for name in methods if name not in text and name != "shared"] == []
    assert [each for each in set(moorage.resources.__all__) - few if each not in text] == []
