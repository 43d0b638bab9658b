"""Who knows one place knows its counterparts: tests lie where the source lies, kinds look alike."""

from pathlib import Path

# Folders of tests that are about more than one room.
STORIES = {
    "simulation",
    "transcripts",
    "conformance",
    "end_to_end",
    "benchmarks",
    "house",
    "browser",
}
WINGS = {"clients": "clients/moorage_client", "policies": "policies/moorage_policies"}
# Rooms whose behaviour is a story: tested there, as a whole, rather than file by file.
TOLD = {
    "core": "simulation",
    "daemon": "end_to_end",
    "engines": "conformance",
    "policy": "policies",  # What a rule sees is tested with the rules that see it.
}
# Rooms with several kinds behind one Protocol: it is in `base.py`, each kind in a file of its name.
KINDS = ("ledger", "engines", "catalog")


def rooms(root: Path) -> dict[str, Path]:
    server = root / "server" / "moorage"
    found = {path.parent.name: path.parent for path in server.glob("*/__init__.py")}
    return found | {name: root / place for name, place in WINGS.items()}


def test_every_folder_of_tests_is_a_room_or_a_story(root: Path, tests) -> None:
    folders = {each.name.split("/")[1] for each in tests if each.name.count("/") > 1}
    assert folders - STORIES <= set(rooms(root))


def test_every_room_has_its_tests(root: Path, tests) -> None:
    tested = {each.name.split("/")[1] for each in tests if "/test_" in each.name}
    busy = {name for name, path in rooms(root).items() if len(list(path.glob("*.py"))) > 1}
    assert {name for name in busy if name not in tested and TOLD.get(name) not in tested} == set()


def test_kinds_of_one_thing_share_their_base(root: Path) -> None:
    server = root / "server" / "moorage"
    assert [room for room in KINDS if not (server / room / "base.py").is_file()] == []


def test_every_test_is_collected(tests) -> None:
    """A file of tests under another name would never run."""
    lost = [
        each.name
        for each in tests
        if "\ndef test_" in each.text and not Path(each.name).name.startswith("test_")
    ]
    assert lost == []
