"""Tests of each cell of the table of rights, and of the message for a refused caller."""

import pytest

from moorage.model import Tenant
from moorage.records.rights import Caller, Right, Role

TABLE = """
              viewer client author operator admin metrics
METRICS       yes    yes    yes    yes      yes   yes
READ          yes    yes    yes    yes      yes   -
PLACE         -      yes    yes    yes      yes   -
LEASE         -      yes    yes    yes      yes   -
EXEC          -      yes    yes    yes      yes   -
POLICY        -      -      yes    yes      yes   -
CLUSTER       -      -      yes    yes      yes   -
READ_ALL      -      -      -      yes      yes   -
POLICY_ALL    -      -      -      yes      yes   -
CLUSTER_ALL   -      -      -      yes      yes   -
CORDON        -      -      -      yes      yes   -
RESERVE       -      -      -      yes      yes   -
QUOTA         -      -      -      yes      yes   -
TOKEN         -      -      -      -        yes   -
"""
ROWS = {line.split()[0]: line.split()[1:] for line in TABLE.strip().splitlines()[1:]}
ROLES = TABLE.split("\n", 2)[1].split()
CELLS = [
    (right, role, cell == "yes")
    for right, cells in ROWS.items()
    for role, cell in zip(ROLES, cells, strict=True)
]


def test_the_table_of_rights_has_a_cell_for_each_right_and_role() -> None:
    assert ROWS.keys() == Right.__members__.keys()
    assert set(ROLES) == {role.value for role in Role}


@pytest.mark.parametrize(("right", "role", "may"), CELLS)
def test_each_role_has_the_rights_of_the_table(right: str, role: str, may: bool) -> None:
    assert Caller(Tenant("ann"), Role(role)).may(Right[right]) is may


def test_the_refusal_for_a_missing_right_names_tenant_and_role_and_a_sufficient_role() -> None:
    reason = Caller(Tenant("ann"), Role.VIEWER).refusal(Right.QUOTA)
    for part in ("“ann”", "viewer", "set or remove quotas", "operator or admin", "token create"):
        assert part in reason
    assert Right.TOKEN.expected == "a token with the role admin"
