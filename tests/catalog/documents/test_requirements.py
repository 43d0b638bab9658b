"""Tests of the packages and versions that `requirements.txt` of a policy may name."""

import numpy as np
import pytest

from moorage.catalog.documents.requirements import LINES_MAX, Unmet, unmet
from moorage.policy.requirements import IMPORTABLE


def find_unmet(text: str | bytes, **files: bytes) -> list[Unmet]:
    content = text.encode() if isinstance(text, str) else text
    return list(unmet({"function.py": b"", "requirements.txt": content, **files}))


def test_a_policy_without_requirements_has_no_warnings():
    assert not list(unmet({"function.py": b""}))


@pytest.mark.parametrize("name", sorted({module.partition(".")[0] for module in IMPORTABLE}))
def test_requirements_for_importable_packages_are_met(name):
    assert not find_unmet(f"{name.upper()} >= 0 ; python_version > '3'  # why")


@pytest.mark.parametrize(
    "line",
    [
        "numpy==2.*",
        "typing-extensions[x]",
        "numpy (>=2)",
        "",
        "  # only a comment",
        "numpy \\\n  >= 2",
        "torch; python_version < '3'",
        "numpy >= 99; python_version < '3'",
    ],
)
def test_installed_or_inapplicable_requirements_are_met(line):
    assert not find_unmet(line)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("numpy>=99", f"is not the version that policies get, numpy {np.__version__}"),
        ("numpy==0.1", f"is not the version that policies get, numpy {np.__version__}"),
        ("numpy>=", "is not a requirement that pip would take"),
        ("numpy --hash=sha256:00", "is not a requirement that pip would take"),
        ("numpy, msgspec", "is not a requirement that pip would take"),
        (
            "numpy" * 300 + ">=1",
            "is not available to policies, and the server installs nothing for them",
        ),
        ("-r more.txt", "is not available to policies, and the server installs nothing for them"),
    ],
)
def test_each_fault_of_a_line_has_its_own_message(line, why):
    assert find_unmet(f"json\n\\\n{line}\n") == [Unmet(2, line, why)]


@pytest.mark.parametrize(
    "line", ["socket", "asyncio", "subprocess", "numpy @ https://x/numpy.whl", "numpy-financial"]
)
def test_packages_that_policies_cannot_import_are_unmet_requirements(line):
    assert find_unmet(f"json\r\n{line}  # !\r\n") == [Unmet(2, line)]


def test_a_requirement_may_name_the_policys_own_files_and_folders():
    files = {"helper.py": b"", "my_lib/__init__.py": b"", "deep/in/it.py": b""}
    assert not find_unmet("helper\nmy-lib\ndeep\n", **files)
    assert find_unmet("it\n", **files) == [Unmet(1, "it")]


def test_a_byte_order_mark_is_not_part_of_a_name():
    assert not find_unmet(b"\xef\xbb\xbfnumpy\n")


def test_the_number_of_read_lines_is_limited():
    assert not find_unmet("numpy\n" * LINES_MAX + "torch")
