"""Tests of aliases: the version that an alias means, its history, and its fallbacks."""

import pytest

from moorage.catalog.embedded.aliases import (
    HISTORY_MAX,
    Alias,
    AliasChange,
    Aliases,
    Canary,
    Former,
    alias_name,
    name_of,
)
from moorage.catalog.embedded.store import DocumentStore, StoredRow
from moorage.catalog.limits import ALIASES_MAX
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.storage.sqlite.records import SqliteRecords


def swap(alias: Alias, version: str, standing: str, digest: str = "") -> Alias:
    change = AliasChange(0.0, "me", "activated", version, alias.version, standing, digest)
    return alias.replace(change, version=version)


def ways(alias: Alias) -> list[str]:
    return [former.version for former in alias.fallbacks()]


@pytest.mark.parametrize(
    ("given", "name"), [("r", "r:stable"), ("a.b-c:x+1", "a.b-c:x+1"), ("_r:v1.0", "_r:v1.0")]
)
def test_the_bare_name_of_a_policy_means_its_stable_alias(given: str, name: str) -> None:
    assert alias_name(given) == name
    assert name_of(name) == given.partition(":")[0]


@pytest.mark.parametrize("given", ["", "r:1-x", "r:", ":x", "-r", "r x", "r" * 300, "r:a:b"])
def test_an_alias_cannot_look_like_a_version_or_be_empty(given: str) -> None:
    with pytest.raises(ServiceError) as refused:
        alias_name(given)
    assert (refused.value.code, refused.value.field) == (Code.BAD_MESSAGE, "alias")


def test_fallbacks_are_good_versions_first_and_then_untried_versions_that_never_failed() -> None:
    alias = Alias("r:stable", "r:1-x")
    for version, standing in (
        ("r:2-x", "good"),
        ("r:3-x", "untried"),
        ("r:4-x", "good"),
        ("r:5-x", "failing"),
        ("r:6-x", "good"),
    ):
        alias = swap(alias, version, standing)
    assert ways(alias) == ["r:5-x", "r:3-x", "r:1-x", "r:2-x"]
    assert "r:4-x" not in ways(alias), "it was failing when the alias left it"
    assert alias.former == "r:5-x"
    once_more = swap(swap(alias, "r:4-x", "good"), "r:7-x", "good")
    assert ways(once_more)[:2] == ["r:4-x", "r:6-x"], "the latest standing of a version counts"
    assert "r:7-x" not in ways(once_more), "an alias does not fall back to its own version"
    untried = swap(swap(once_more, "r:6-x", "good"), "r:7-x", "untried")
    assert ways(untried)[0] == "r:6-x", "the last answer of that version was good"


def test_a_version_with_changed_content_is_not_a_proven_fallback() -> None:
    """A version whose content changed and that has had no request counts as untried."""
    alias = swap(Alias("r:stable", "r:1-x"), "r:2-x", "good", "old")
    assert (alias.former, alias.former_digest) == ("r:1-x", "old")
    assert alias.fallbacks() == [Former("r:1-x", "old")]
    assert not Former("r:1-x", "old").is_still("new")
    assert Former("r:1-x", "").is_still("any"), "entries of old releases have no digest"
    again = swap(swap(alias, "r:1-x", "good", "b"), "r:3-x", "untried", "new")
    assert again.fallbacks() == [Former("r:2-x", "b"), Former("r:1-x", "new")]


def test_the_history_of_an_alias_is_bounded() -> None:
    alias = Alias("r:stable", "r:0-x")
    for number in range(HISTORY_MAX + 5):
        alias = swap(alias, f"r:{number}-x", "good")
    assert len(alias.history) == HISTORY_MAX
    assert alias.history[-1].version == f"r:{HISTORY_MAX + 4}-x"


async def test_a_change_of_an_alias_is_durable_before_watchers_learn_of_it(tmp_path) -> None:
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    aliases = Aliases(store)
    made = Alias("r:stable", "r:1-x", Canary("r:2-x", 5.0), "r:3-x")
    await aliases.change("r:stable", lambda _: made)
    assert (aliases.meaning("r"), aliases.meaning("r:stable")) == ("r:1-x", "r:1-x")
    assert aliases.meaning("other:1-x") == "other:1-x"
    assert ("r" in aliases, "r:beta" in aliases) == (True, False)
    assert aliases.using("r:2-x") == aliases.using("r:3-x") == ["r:stable"]

    def refuse(_: Alias | None) -> Alias:
        raise ServiceError(Code.CONFLICT, "no")

    with pytest.raises(ServiceError):
        await aliases.change("r:stable", refuse)
    assert aliases.all() == [made]
    await store.close()
    again = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    stored = await again.run(lambda database: [row.id for row in database.rows("alias")])
    assert stored == ["r:stable"]
    aliases = Aliases(again)
    aliases.take_over([made])
    assert (await aliases.delete("r:stable")) == made
    assert aliases.meaning("r") == "r"
    with pytest.raises(ServiceError):
        await aliases.delete("r:stable")
    await again.close()


async def test_the_number_of_aliases_is_limited(tmp_path) -> None:
    store = await DocumentStore.open(SqliteRecords(tmp_path / "catalog.db"))
    aliases = Aliases(store)
    await store.run(
        lambda database: [
            database.put("alias", StoredRow(f"r:{number}", b"")) for number in range(ALIASES_MAX)
        ]
    )
    with pytest.raises(ServiceError) as refused:
        await aliases.change("s:x", lambda _: Alias("s:x", "s:1-x"))
    assert refused.value.code is Code.TOO_LARGE
    await store.close()
