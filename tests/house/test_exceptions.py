"""The exceptions of a public package are one tree, which the package's docstring shows."""

import importlib
import re
import subprocess
import sys

import pytest

PUBLIC = (
    "moorage_client",
    "moorage_policies",
    "moorage.policy",
    "moorage.protocol",
    "moorage.slices",
    "moorage.slots",
    "moorage.testing",
)

STANDS_APART = {
    "APIError",  # Documented as a separate class, and policies catch it as such.
}


def exported_exceptions(package: str) -> list[type[BaseException]]:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    values = [getattr(module, name) for name in names]
    errors = [value for value in values if isinstance(value, type)]
    errors = [error for error in errors if issubclass(error, BaseException)]
    return [error for error in errors if error.__name__ not in STANDS_APART]


@pytest.mark.parametrize("package", PUBLIC)
def test_the_exceptions_of_a_public_package_are_one_tree(package: str) -> None:
    errors = exported_exceptions(package)
    roots = [each for each in errors if all(each is o or not issubclass(each, o) for o in errors)]
    assert len(roots) <= 1, [each.__name__ for each in roots]
    if len(errors) > 1:
        drawn = importlib.import_module(package).__doc__ or ""
        assert [each.__name__ for each in errors if each.__name__ not in drawn] == []


def test_the_exceptions_of_the_client_are_one_tree() -> None:
    assert exported_exceptions("moorage_client")


@pytest.mark.parametrize("name", STANDS_APART)
def test_exceptions_outside_the_tree_are_listed(name: str) -> None:
    assert name in (importlib.import_module("moorage_client").__doc__ or "")


IMPORT_EVERYTHING = """
import importlib, pkgutil, threading
for package in ("moorage", "moorage_policies", "moorage_client"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(*threading.enumerate())
"""


@pytest.mark.heavy  # All extras.
def test_the_public_packages_import_without_side_effects(tmp_path) -> None:
    """The import of a module causes no warning, starts no thread and writes no file."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_EVERYTHING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,  # The output shows the fault.
    )
    assert done.stderr == ""
    assert re.fullmatch(r"<_MainThread\(MainThread, started \d+\)>\n", done.stdout)
    assert list(tmp_path.iterdir()) == []
