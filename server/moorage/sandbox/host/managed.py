"""Settings and parameters that `management` of a policy has changed, for one version and tenant.

`Sandbox` puts them between the policy's defaults and what a request says, at every evaluation, so
all cells agree. The daemon keeps them on the disk: `daemon.publishing.management`.
"""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from moorage.core.turns.effects import Consult
from moorage.model import PolicyRef
from moorage.records.json_values import JsonMapping, JsonObject

Changes = Mapping[str, JsonMapping]
"""`settings` and `parameters`, by name; what is missing is unchanged."""
_NONE: Final[JsonObject] = {}


class Managed:
    """Changes by `management`, as they are now."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, str, str], Changes] = {}

    def of(self, ref: PolicyRef, tenant: str) -> Changes:
        """Return the changes of a version for a tenant."""
        return self._changes.get((ref.uri, ref.digest, tenant), {})

    def put(self, uri: str, digest: str, tenant: str, changes: Changes) -> None:
        """Put changes in force, in place of earlier ones; {}: none."""
        self._changes.pop((uri, digest, tenant), None)
        if changes:
            self._changes[uri, digest, tenant] = changes

    def merge(
        self, ref: PolicyRef, tenant: str, settings: JsonMapping, parameters: JsonMapping
    ) -> tuple[JsonMapping, JsonMapping]:
        """Return a request's overrides of defaults, on top of the changes."""
        changes = self._changes.get((ref.uri, ref.digest, tenant)) if self._changes else None
        if not changes:
            return settings, parameters
        return (
            {**changes.get("settings", _NONE), **settings},
            {**changes.get("parameters", _NONE), **parameters},
        )

    def apply(self, consult: Consult, ref: PolicyRef) -> Consult:
        """Return a consultation whose ask has the changes, too."""
        if not self._changes:
            return consult
        ask = consult.ask
        settings, parameters = self.merge(ref, ask.tenant, ask.settings, ask.parameters)
        return replace(consult, ask=replace(ask, settings=settings, parameters=parameters))
