"""What `requirements.txt` may name."""

import pytest

from moorage.policy.requirements import IMPORTABLE, LINES_MAX, Unmet, unmet


def wanted(text: str | bytes, **files: bytes) -> list[Unmet]:
    content = text.encode() if isinstance(text, str) else text
    return list(unmet({"function.py": b"", "requirements.txt": content, **files}))


def test_a_rule_without_requirements_wants_nothing():
    assert not list(unmet({"function.py": b""}))


@pytest.mark.parametrize("name", sorted({module.partition(".")[0] for module in IMPORTABLE}))
def test_all_that_is_importable_may_be_named(name):
    assert not wanted(f"{name.upper()} >= 1 ; python_version > '3'  # why")


@pytest.mark.parametrize(
    "line", ["numpy==2.*", "typing-extensions[x]", "numpy (>=2)", "", "  # only a comment"]
)
def test_versions_extras_and_comments_are_passed_over(line):
    assert not wanted(line)


@pytest.mark.parametrize(
    "line", ["socket", "asyncio", "subprocess", "numpy @ https://x/numpy.whl", "numpy-financial"]
)
def test_what_a_rule_cannot_import_is_unmet(line):
    assert wanted(f"json\r\n{line}  # !\r\n") == [Unmet(2, line)]


def test_a_rules_own_files_and_folders_may_be_named():
    files = {"helper.py": b"", "my_lib/__init__.py": b"", "deep/in/it.py": b""}
    assert not wanted("helper\nmy-lib\ndeep\n", **files)
    assert wanted("it\n", **files) == [Unmet(1, "it")]


def test_a_byte_order_mark_is_no_part_of_a_name():
    assert not wanted(b"\xef\xbb\xbfnumpy\n")


def test_only_so_many_lines_are_read():
    assert not wanted("numpy\n" * LINES_MAX + "torch")
