"""Folders of tests mirror those of the source, and files of one kind share their names."""

from pathlib import Path

# Folders of tests for more than one package.
ACROSS = {
    "simulation",
    "transcripts",
    "conformance",
    "end_to_end",
    "benchmarks",
    "house",
    "browser",
    "docs",
    "examples",
    "kubernetes",  # The control plane that tests of several packages use.
}
OUTSIDE = {"clients": "clients/moorage_client", "policies": "policies/moorage_policies"}
# Packages that the tests of another folder test as a whole.
AS_A_WHOLE = {
    "core": "simulation",
    "daemon": "end_to_end",
    "backends": "conformance",
    "commands": "end_to_end",
    "pool_server": "clients",  # Together with its client.
    "policy": "policies",  # Together with the policies that use it.
}
# Packages with several kinds behind one Protocol, and the Protocol's file.
KINDS = ("ledger/base.py", "backends/base.py", "catalog/ports.py")


def packages(root: Path) -> dict[str, Path]:
    server = root / "server" / "moorage"
    found = {path.parent.name: path.parent for path in server.glob("*/__init__.py")}
    return found | {name: root / place for name, place in OUTSIDE.items()}


def test_each_folder_of_tests_belongs_to_a_package_or_spans_several_packages(
    root: Path, tests
) -> None:
    folders = {each.name.split("/")[1] for each in tests if each.name.count("/") > 1}
    assert folders - ACROSS <= set(packages(root))


def test_inner_folders_of_tests_mirror_inner_packages(root: Path, tests) -> None:
    known = packages(root)
    inner = {tuple(each.name.split("/")[1:3]) for each in tests if each.name.count("/") > 2}
    lost = [
        "/".join(pair)
        for pair in inner
        if pair[0] in known and not (known[pair[0]] / pair[1] / "__init__.py").is_file()
    ]
    assert [each for each in lost if each != "sandbox/attacks"] == []  # These test all of it.


def test_every_package_has_its_tests(root: Path, tests) -> None:
    tested = {each.name.split("/")[1] for each in tests if "/test_" in each.name}
    busy = {name for name, path in packages(root).items() if len(list(path.rglob("*.py"))) > 1}
    untested = {name for name in busy if name not in tested}
    assert {name for name in untested if AS_A_WHOLE.get(name) not in tested} == set()


def test_each_kind_of_implementation_has_the_file_of_its_interface(root: Path) -> None:
    server = root / "server" / "moorage"
    assert [name for name in KINDS if not (server / name).is_file()] == []


def test_every_test_is_collected(tests) -> None:
    """pytest would never run tests in a file without the prefix `test_`."""
    lost = [
        each.name
        for each in tests
        if "\ndef test_" in each.text and not Path(each.name).name.startswith("test_")
    ]
    assert lost == []
