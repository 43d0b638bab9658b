"""The settings about who may hold how much; `Config` has them with all others."""

from dataclasses import dataclass
from typing import Annotated

from moorage.config.kinds import QUOTAS, QuotaSetting
from moorage.model import OVERTAKEN_MAX
from moorage.setting_kinds import NAMES, Setting, seconds, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSettings:
    """Quotas, order of the queue, and operators."""

    operators: Annotated[
        tuple[str, ...],
        Setting(
            NAMES,
            "Tenants that see what all hold, set quotas, cordon and drain, and change clusters on "
            "which others have leases.",
            default="none",
        ),
    ] = ()
    quotas: Annotated[
        tuple[QuotaSetting, ...],
        Setting(
            QUOTAS,
            "What tenants and their projects may hold, set at each start; `*` is each tenant that "
            "has no quota of its own.",
            default="none",
        ),
    ] = ()
    usage_half_life_seconds: Annotated[
        float,
        Setting(
            seconds(0, 31_536_000),
            "After how long what a tenant held counts half as much when it waits; 0: only what it "
            "holds now counts.",
        ),
    ] = 0.0
    overtaken_max: Annotated[
        int,
        Setting(
            whole(1, 1_000_000),
            "Later requests of its priority or below that may go before a waiter; then it goes "
            "before all others of its priority, whatever its tenant holds.",
        ),
    ] = OVERTAKEN_MAX
