"""The embedded search service: returns the results of filters and similarity searches.

`admission` asks it for the candidates of a request, `services` for the documents that the search
endpoints answer. The catalog finds, the sandbox runs ranking policies; both meet here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from moorage.catalog.allowances import Allowance
from moorage.catalog.documents.policies import entry_name
from moorage.catalog.embedded.records import unknown_id_error
from moorage.catalog.ports import Catalog
from moorage.catalog.search import refusal_of
from moorage.catalog.values import Document, PolicyRecord, SearchAction
from moorage.core.state.facts import Refusal
from moorage.daemon.answers import error_of
from moorage.daemon.policies.schema_guard import SchemaGuard
from moorage.daemon.policies.searchables import Searched, find_searched
from moorage.model import Code, Tenant
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError
from moorage.query import Filter, QueryError, Search, parse_filter, parse_search
from moorage.records.json_values import JsonMapping, JsonValue
from moorage.sandbox.host import contract
from moorage.sandbox.host.sandbox import PolicyFault, Sandbox
from moorage.sandbox.wire.limits import INPUT_BYTES_MAX

T = TypeVar("T")

SEARCHES_MAX: Final = 2
"""Maximum searches at a time, one per tenant: a single thread executes them."""
SEARCHES_WAITING_MAX: Final = 1024
"""Maximum waiting searches; with one more, the tenant with most searches loses its latest."""
RANKING_SECONDS_MAX: Final = 30.0
"""Maximum seconds for a ranking and its wait for a cell; after them, the answer is `busy`."""
SHOWN_CHARS_MAX: Final = 60
"""Maximum characters of a policy's wrong answer that the refusal shows."""


@dataclass(frozen=True, slots=True)
class FoundCandidates:
    """The result of a filter or search.

    Args:
        ids: The found ids; for a search, the best first.
        matched: Number of results before clusters that are not live were left out.
        warnings: Sentences about documents that could not be read, and about omitted metrics.
        added: Fields that a ranking policy added to documents, such as a score, by id.
        of: The documents of the searched kind.
        ranked: Whether this is the result of a search, not of a filter.
    """

    ids: Sequence[str]
    matched: int
    warnings: list[str]
    added: Mapping[str, Document]
    of: Searched
    ranked: bool

    def documents(self) -> list[Document]:
        """Return the documents found, as stored, with the fields added to them."""
        documents = (self.of.ranked if self.ranked else self.of.documents)(self.ids)
        return [{**each, **self.added.get(each["id"], {})} for each in documents]


class Finder:
    """Finds and ranks documents for searches, and candidates for requests.

    Args:
        catalog: Has the documents and the ranking policies.
        sandbox: Executes the ranking policies.
    """

    def __init__(self, catalog: Catalog, sandbox: Sandbox) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._turns = FairSemaphore(SEARCHES_MAX, SEARCHES_WAITING_MAX, busy="searches wait")

    async def answer(
        self, action: SearchAction, body: Document, tenant: Tenant
    ) -> tuple[list[Document], list[str]]:
        """Answer the search service's endpoints; return documents and warnings."""
        found = await self.find(action, body, tenant, Allowance())
        return found.documents(), found.warnings

    async def find(
        self,
        action: SearchAction,
        body: Document,
        tenant: Tenant,
        allowance: Allowance,
        *,
        at: str = "",
        candidates: bool = False,
    ) -> FoundCandidates:
        """Return the results of a filter or a search.

        Args:
            action: Filter or search.
            body: As the client sent it, bare or in its envelope.
            tenant: The caller's tenant. The search waits for this tenant's turn, and a ranking
                policy acts for this tenant.
            allowance: Limits the requests to external services.
            at: Path of the body in the message, a prefix of the fields in refusals.
            candidates: Search only clusters, and rank only the live ones.

        Raises:
            ServiceError: `bad_message`, `unsupported` or `too_large` naming the place in the body;
                the code of the ranking policy's fault; `busy`; `unavailable`.
        """
        search, uri = None, ""
        async with self._turns.turn(tenant):
            if action == "filter":
                wanted = await _parse(parse_filter, body, at)
            else:
                search = await _parse(parse_search, body, at)
                wanted, uri = search.filter or Filter(search.match_type), search.policy_rule_uri
        field = _under(_values(body, at)[1], "matchType")
        if candidates and wanted.match_type != "cluster":
            reason = f"{field}: the candidates of a request are clusters; expected cluster"
            raise ServiceError(Code.UNSUPPORTED, reason, field=field, expected="cluster")
        of = await find_searched(self._catalog, wanted.match_type, field)
        clusters = None if wanted.match_type != "policy" else ()
        warnings = await self._catalog.freshness.fetch(uri, clusters, allowance)
        if wanted.match_type == "block":
            warnings += await self._catalog.blocks.fetch(allowance)
        async with self._turns.turn(tenant):
            ids = await of.matching(wanted)
        live = [each for each in ids if self._catalog.memory.is_live(each)] if candidates else ids
        if search is None or not live:
            # An empty result needs no ranking.
            return FoundCandidates(live, len(ids), warnings, {}, of, ranked=search is not None)
        place = _policy_place(body, at)
        if uri:
            documents = _to_rank(of, live, warnings)
            field = f"{place}.policyRuleURI"
            ranked = await self._rank_by(search, documents, tenant, field)
        else:
            async with self._turns.turn(tenant):
                ranked = dict.fromkeys(await _alike(search, of, live, place), Document())
        best = list(ranked)[: search.limit]
        return FoundCandidates(best, len(ids), warnings, ranked, of, ranked=True)

    async def _rank_by(
        self, search: Search, documents: Sequence[Document], tenant: Tenant, field: str
    ) -> dict[str, Document]:
        """Return the ids in the order of a ranking policy, with the fields that it adds to each."""
        uri = search.policy_rule_uri
        record = self._catalog.memory.policy(uri)
        if record is None:
            expected = "the URI of a registered policy"
            reason = f"{field}: no policy “{uri}” is registered."
            raise ServiceError(Code.UNKNOWN_POLICY, reason, field=field, expected=expected)
        try:
            async with asyncio.timeout(RANKING_SECONDS_MAX):
                value = await self._sandbox.evaluate(
                    code_of(record),
                    tenant,
                    documents,
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
            reason = f"Ranking {len(documents)} documents by {uri}: {no.reason}{hint}"
            place = place_of(no, field.removesuffix(".policyRuleURI")) or field
            raise error_of(no, reason=reason, field=place) from fault
        return _choose(value, [each["id"] for each in documents], uri, field)


def _to_rank(of: Searched, ids: Sequence[str], warnings: list[str]) -> list[Document]:
    """Return the documents for a ranking policy; without their metrics if they are too large."""
    if of.ranking_bytes(ids) <= INPUT_BYTES_MAX:
        return of.ranked(ids)
    what = f"The metrics of {len(ids)} clusters were left out"
    why = f"a policy ranks at most {INPUT_BYTES_MAX} bytes"
    way = "read them by `cluster_metrics_api`, or rank fewer, with a `filterRule`"
    warnings.append(f"{what}, as {why}: {way}.")
    return [{**each, "metrics": {}} for each in of.documents(ids)]


async def _alike(search: Search, of: Searched, ids: Sequence[str], place: str) -> list[str]:
    """Return the ids in the order of the built-in ranking."""
    if isinstance(search.like, str) and not of.knows(search.like):
        expected = f"the id of a registered {search.match_type}, or a part of such a document"
        raise ServiceError.wrong_field(f"{place}.parameters.like", expected)
    among = frozenset(ids)
    return [each for each in await of.alike(search.like, search.weights) if each in among]


async def fetch_policy(catalog: Catalog, uri: str) -> PolicyRecord:
    """Return the policy of a URI; load it first if only an external store has it.

    Raises:
        ServiceError: `unknown_policy`, or the policy's store cannot be reached.
    """
    await catalog.freshness.fetch(uri, (), Allowance())
    record = catalog.memory.policy(uri)
    if record is None:
        raise unknown_id_error("policy", uri, catalog.memory.policy_uris())
    return record


def code_of(record: PolicyRecord) -> contract.PolicyCode:
    """Return a registered policy in the form that the sandbox loads."""
    guard = None if record.schemas is None else SchemaGuard(record.schemas)
    deadline = float(record.document.get("deadline_seconds") or 0)
    return contract.PolicyCode(
        record.ref,
        record.files,
        record.settings,
        record.parameters,
        guard,
        deadline,
        entry_name(record.document, record.files),
    )


def place_of(no: Refusal, at: str) -> str:
    """Return the path of the refused field in the request; "" if the refusal names no field.

    Args:
        no: Why the policy was not consulted.
        at: Path of the object in the request that has the policy's URI, parameters and settings.
    """
    overrides = no.field.partition(".")[0] in {"parameters", "settings"}
    return f"{at}.{no.field}" if overrides else no.field


async def _parse(parse: Callable[[JsonValue, str], T], body: Document, at: str) -> T:
    try:
        # Parsing turns patterns into tables, which may take milliseconds.
        return await asyncio.to_thread(parse, body, at)
    except QueryError as error:
        raise refusal_of(error) from error


def _choose(value: JsonValue, offered: Sequence[str], uri: str, field: str) -> dict[str, Document]:
    """Return the ids in a ranking policy's answer, without duplicates, or refuse the answer."""
    known = frozenset(offered)
    chosen: dict[str, Document] = {}
    for each in value if isinstance(value, list) else [value]:
        name = each.get("id") if isinstance(each, dict) else each
        if not isinstance(name, str) or name not in known:
            shown = repr(each)[:SHOWN_CHARS_MAX]
            raise ServiceError(
                Code.POLICY_BAD_OUTPUT,
                f"{uri} ranked {shown}, which is not among its {len(offered)} documents.",
                field=field,
                expected="documents of its input, or their ids, the best first",
                details={"policy_rule_uri": uri},
            )
        chosen.setdefault(name, each if isinstance(each, dict) else {})
    return chosen


# Paths in a body that the parser has accepted, so its shape needs no checks -----------------


def _under(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _values(body: Document, at: str) -> tuple[JsonMapping, str]:
    """Return the content of the envelope, and its path."""
    if "body" not in body:
        return body, at
    values: JsonMapping = body["body"]["values"]
    return values, _under(at, "body.values")


def _policy_place(body: Document, at: str) -> str:
    values, at = _values(body, at)
    at = _under(at, "rankingPolicyRule")
    return f"{at}.values" if "values" in values["rankingPolicyRule"] else at
