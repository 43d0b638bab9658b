"""A bound that tenants share leaves room for other tenants, however much one tenant sends."""

from by_hand import ask

from moorage.core.state.tenant_loads import OVERFLOW_SHARE, TENANT_SHARE, TenantLoads

MANY, BYTES = 64, 6_400


def let_in(loads: TenantLoads, tenant: str, size: int) -> int:
    """Return how many requests of a tenant are admitted."""
    many = 0
    while loads.has_room(one := ask("r", None, tenant=tenant, size=size), MANY, BYTES):
        loads.add(one)
        many += 1
    return many


def test_a_single_tenant_may_use_the_whole_limit_and_other_tenants_still_get_a_part() -> None:
    loads = TenantLoads()
    assert let_in(loads, "mallory", 0) == MANY
    assert let_in(loads, "bob", 0) == let_in(loads, "cay", 0) == MANY // TENANT_SHARE
    assert let_in(loads, "dan", 0) == 0
    assert loads.count == MANY + MANY // OVERFLOW_SHARE


def test_tenants_share_a_limit_of_bytes_like_a_limit_of_counts() -> None:
    loads = TenantLoads()
    assert let_in(loads, "mallory", 200) == BYTES // 200
    assert let_in(loads, "bob", 50) == BYTES // TENANT_SHARE // 50
    assert not loads.has_room(ask("r", None, tenant="bob", size=1), MANY, BYTES)


def test_a_tenant_without_load_is_forgotten() -> None:
    loads = TenantLoads()
    let_in(loads, "mallory", 100)
    for _ in range(MANY):
        loads.remove(ask("r", None, tenant="mallory", size=100))
    assert vars(loads) == vars(TenantLoads())
