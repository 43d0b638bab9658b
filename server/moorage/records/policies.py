"""Records of running policies: aliases, canaries, shadows, and results and output of versions."""

from typing import Annotated, Final

from msgspec import UNSET, Struct, UnsetType

from moorage.model import Share
from moorage.records.fields import values
from moorage.records.json_values import JsonObject

Latency = dict[str, float] | None
"""Median and 99th percentile, in milliseconds: `p50`, `p99`."""


class PolicyHistoryEntry(Struct, frozen=True, omit_defaults=True):
    """A change of a policy; `at` is in seconds since the epoch.

    Attributes:
        who: The tenant that made the change; empty: the server has no tenants.
        digest: Digest of the URI's content at that time.
        fields: The changed fields of the document, if the change is `described`.
    """

    at: float
    who: str
    what: Annotated[str, values("registered", "described", "removed")]
    digest: str
    fields: tuple[str, ...] = ()


class PolicyOutput(Struct):
    """The output and log of a version, and its open circuit for the caller's tenant, if any."""

    policy_rule_uri: str
    printed: dict[str, str]
    rests: dict[str, float] | None
    changed: JsonObject | UnsetType = UNSET


class CanaryShare(Struct):
    """The share of an alias's requests that goes to another version."""

    version: str
    percent: float
    by: Annotated[str, values("request", "tenant")]
    seed: int


class AliasDocument(Struct):
    """An alias and its versions. Lists of aliases omit the histories."""

    alias: str
    policy_rule_uri: str
    canary: CanaryShare | None
    shadow: str | None
    former: str | None = None
    who: str | None = None
    history: list[JsonObject] = []


class VersionReport(Struct):
    """The outcomes of a version under an alias."""

    policy_rule_uri: str
    asked: int
    granted: int
    advised: int
    refused: dict[str, int]
    faults: int
    consecutive_faults: int
    tenants: int
    failing_tenants: int
    latency_ms: Latency


class CanaryOutcomes(Struct):
    """The outcomes of the active version and of the candidate."""

    alias: str
    canary: CanaryShare | None
    active: VersionReport
    candidate: VersionReport | None


class ComparedVersion(Struct, kw_only=True):
    """The results of one of two versions for the same requests."""

    policy_rule_uri: str
    placed: int
    refused: int
    outcomes: dict[str, int] | UnsetType = UNSET
    gpus_opened: int | UnsetType = UNSET
    nodes_opened: int | UnsetType = UNSET
    latency_ms: Latency


class RefusedAnswer(Struct):
    """Why a version refused a request."""

    code: str
    reason: str


class ComparedAnswer(Struct):
    """The answer of a version to one request: a placement, a refusal, or another value."""

    error: RefusedAnswer | UnsetType = UNSET
    placement: list[Share] | UnsetType = UNSET
    data: str | UnsetType = UNSET


class ComparedRequest(Struct):
    """A request that two versions answered differently."""

    request: str
    active: ComparedAnswer
    candidate: ComparedAnswer


class ShadowComparison(Struct, frozen=True, kw_only=True):
    """How the candidate differs. `whole`: exact figures, which only the alias's owner gets."""

    alias: str
    since: float
    whole: bool
    asked: int
    dropped: int
    abandoned: int
    compared: int
    same: int
    differ: int
    differ_alone: int | UnsetType = UNSET
    active: ComparedVersion
    candidate: ComparedVersion
    cost: dict[str, int]
    samples: list[ComparedRequest]


OF_POLICIES: Final = (
    AliasDocument,
    CanaryOutcomes,
    PolicyHistoryEntry,
    PolicyOutput,
    ShadowComparison,
)
"""The records that a reply about policies may have; they contain all others here."""
