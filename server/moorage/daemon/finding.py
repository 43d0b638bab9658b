"""The embedded search service: which clusters a filter or a similarity search means.

`admission` asks it for the candidates of a request, `services` for the documents that the search
endpoints answer. Finding is the catalog's, ranking by a policy the sandbox's; they meet here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from moorage.catalog.base import Allowance, Catalog, Document, PolicyRecord, SearchAction
from moorage.catalog.search import refusal_of
from moorage.daemon.guard import SchemaGuard
from moorage.model import ClusterId, Code, Tenant
from moorage.protocol.faults import ServiceError
from moorage.query import Filter, MatchType, QueryError, Search, parse_filter, parse_search
from moorage.sandbox import contract as sandbox
from moorage.sandbox.host import PolicyFault, Sandbox

T = TypeVar("T")

RANKING_SECONDS_MAX: Final = 30.0
"""How long a ranking may take with the time it waits for a cell; then the answer is BUSY."""
SHOWN_CHARS_MAX: Final = 60
"""Characters of a policy's wrong answer that the refusal shows."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a filter or search.

    Args:
        ids: The clusters, those of a search in the order of their rank.
        matched: How many there were before those that are not live were left out.
        warnings: What could not be read, and what that left out.

    """

    ids: Sequence[ClusterId]
    matched: int
    warnings: list[str]


class Finder:
    """Finds clusters.

    Args:
        catalog: Has the documents and the ranking policies.
        rules: Runs those.

    """

    def __init__(self, catalog: Catalog, rules: Sandbox) -> None:
        self._catalog = catalog
        self._rules = rules

    async def find(
        self,
        action: SearchAction,
        body: Document,
        tenant: Tenant,
        allowance: Allowance,
        *,
        at: str = "",
        live_only: bool = False,
    ) -> Found:
        """Return the clusters that a filter or a search finds.

        Args:
            action: Which of the two.
            body: As the client sent it, bare or in its envelope.
            tenant: On whose behalf a policy ranks.
            allowance: What this may cause at external services.
            at: The place of the body, with which the fields of refusals start.
            live_only: Leave out what can be no candidate, before anything is ranked.

        Raises:
            ServiceError: `bad_message`, `unsupported` or `too_large` naming the place in the body;
                what the ranking policy did wrong; `busy`; `unavailable`.

        """
        if action == "filter":
            asked = await _parsed(parse_filter, body, at)
            _refuse_others(asked.match_type, body, at)
            warnings = await self._catalog.fetch("", None, allowance)
            ids = await self._catalog.matching(asked)
            kept = self._kept(ids, live_only=live_only)
            return Found(kept, len(ids), warnings)
        search = await _parsed(parse_search, body, at)
        _refuse_others(search.match_type, body, at)
        warnings = await self._catalog.fetch(search.policy_rule_uri, None, allowance)
        ids = await self._catalog.matching(search.filter or Filter("cluster"))
        kept = self._kept(ids, live_only=live_only)
        if kept:  # Where nothing is found, nothing is ranked (allocation-server.md, 5.5).
            kept = (await self._ranked(search, kept, tenant, _rule_place(body, at)))[: search.limit]
        return Found(kept, len(ids), warnings)

    def documents(self, found: Found) -> list[Document]:
        """Return the documents of what was found, as stored."""
        return self._catalog.cluster_documents(found.ids)

    def _kept(self, ids: Sequence[ClusterId], *, live_only: bool) -> Sequence[ClusterId]:
        return [each for each in ids if self._catalog.is_live(each)] if live_only else ids

    async def _ranked(
        self, search: Search, ids: Sequence[ClusterId], tenant: Tenant, at: str
    ) -> Sequence[ClusterId]:
        uri = search.policy_rule_uri
        if uri:
            record = self._catalog.policy(uri)
            if record is None:
                field, expected = f"{at}.policyRuleURI", "the URI of a registered policy"
                reason = f"{field}: no policy “{uri}” is registered."
                raise ServiceError(Code.UNKNOWN_POLICY, reason, field=field, expected=expected)
            return await self._ranked_by(record, search, ids, tenant, f"{at}.policyRuleURI")
        if isinstance(search.like, str) and not self._catalog.known(search.like):
            expected = "the id of a registered cluster, or a part of a cluster document"
            raise ServiceError.wrong_field(f"{at}.parameters.like", expected)
        among = frozenset(ids)
        alike = await self._catalog.alike(search.like, search.weights)
        return [each for each in alike if each in among]

    async def _ranked_by(
        self,
        record: PolicyRecord,
        search: Search,
        ids: Sequence[ClusterId],
        tenant: Tenant,
        field: str,
    ) -> Sequence[ClusterId]:
        uri = record.ref.uri
        try:
            async with asyncio.timeout(RANKING_SECONDS_MAX):
                value = await self._rules.evaluate(
                    code_of(record),
                    tenant,
                    self._catalog.cluster_documents(ids),
                    parameters=search.parameters,
                    settings=search.settings,
                    ids_only=True,
                )
        except TimeoutError as error:
            reason = f"{uri} could not rank within {RANKING_SECONDS_MAX:g} s; try again shortly."
            raise ServiceError(Code.BUSY, reason, field=field) from error
        except PolicyFault as fault:
            no = fault.refusal
            hint = "; rank fewer, with a `filterRule`" if no.code is Code.TOO_LARGE else ""
            raise ServiceError(
                no.code,
                f"Ranking {len(ids)} clusters by {uri}: {no.reason}{hint}",
                field=field,
                expected=no.expected,
                details=no.details,
            ) from fault
        return _chosen(value, ids, uri, field)


def code_of(record: PolicyRecord) -> sandbox.PolicyCode:
    """Return a registered rule as the sandbox loads it."""
    guard = None if record.schemas is None else SchemaGuard(record.schemas)
    return sandbox.PolicyCode(record.ref, record.files, record.settings, record.parameters, guard)


async def _parsed(parse: Callable[[Any, str], T], body: Document, at: str) -> T:
    try:
        # Patterns become tables while they are parsed, which may take milliseconds.
        return await asyncio.to_thread(parse, body, at)
    except QueryError as error:
        raise refusal_of(error) from error


def _refuse_others(match_type: MatchType, body: Document, at: str) -> None:
    if match_type != "cluster":
        field = _under(_values(body, at)[1], "matchType")
        reason = f"{field}: {match_type} is not searched here; expected cluster"
        raise ServiceError(Code.UNSUPPORTED, reason, field=field, expected="cluster")


def _chosen(value: Any, offered: Sequence[ClusterId], uri: str, field: str) -> Sequence[ClusterId]:
    """Return the ids that a ranking policy answered, each once, or refuse its answer."""
    listed = value if isinstance(value, list) else [value]
    known = frozenset(offered)
    wrong = [each for each in listed if not isinstance(each, str) or each not in known]
    if wrong:
        shown = repr(wrong[0])[:SHOWN_CHARS_MAX]
        raise ServiceError(
            Code.POLICY_BAD_OUTPUT,
            f"{uri} ranked {shown}, which is none of the {len(offered)} documents it was given.",
            field=field,
            expected="documents of its input, or their ids, the best first",
            details={"policy_rule_uri": uri},
        )
    return [ClusterId(each) for each in dict.fromkeys(listed)]


# Places in a body that was parsed, and so has the shape that it must have --------------------


def _under(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _values(body: Document, at: str) -> tuple[Mapping[str, Any], str]:
    """Return what lies in the envelope, and its place."""
    if "body" not in body:
        return body, at
    values: Mapping[str, Any] = body["body"]["values"]
    return values, _under(at, "body.values")


def _rule_place(body: Document, at: str) -> str:
    values, at = _values(body, at)
    at = _under(at, "rankingPolicyRule")
    return f"{at}.values" if "values" in values["rankingPolicyRule"] else at
