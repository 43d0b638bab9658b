"""Logins to the console: of one tenant so many, at no other one's cost."""

from moorage.daemon.access.console_logins import (
    LOGINS_MAX,
    LOGINS_OF_TENANT_MAX,
    ConsoleLogins,
)
from moorage.model import Tenant
from moorage.records.rights import Caller, Role


def logins() -> ConsoleLogins:
    def caller(token: str | None) -> Caller | None:
        return Caller(Tenant(token), Role.CLIENT) if token else None

    return ConsoleLogins(caller, 3600.0)


def cookie(logins: ConsoleLogins, tenant: str) -> str:
    entered = logins.enter(tenant)
    assert entered is not None
    return entered[0]


def test_a_thousand_logins_of_one_tenant_end_none_of_another() -> None:
    store = logins()
    other = cookie(store, "b")
    ours = [cookie(store, "a") for _ in range(LOGINS_MAX + 1)]
    assert store.find([other]) is not None
    assert sum(store.find([each]) is not None for each in ours) == LOGINS_OF_TENANT_MAX
    assert store.find([ours[-1]]) is not None


def test_where_all_are_taken_the_tenant_with_most_gives_way() -> None:
    store = logins()
    many = [cookie(store, "a") for _ in range(LOGINS_OF_TENANT_MAX)]
    few = [cookie(store, f"t{number}") for number in range(LOGINS_MAX)]
    assert all(store.find([each]) is not None for each in few)
    assert sum(store.find([each]) is not None for each in many) <= 1
