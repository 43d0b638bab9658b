"""All refusals of the core, each with its code, sentence, field and expected value.

The rest of the core calls these functions, so that equal refusals have equal texts.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, islice, takewhile
from typing import Final

from msgspec.structs import replace

from moorage.core.state.facts import Refusal
from moorage.model import GPU_MILLI, Code, Lease, RequestId
from moorage.policy import ProposalError
from moorage.records.fields import field_title
from moorage.records.json_values import JsonMapping, JsonValue

_NOT_NOW: Final = {"verdict": "not_now"}
PASSING: Final = frozenset(
    {Code.BUSY, Code.POLICY_CRASHED, Code.POLICY_TIMEOUT, Code.SHUTTING_DOWN, Code.UNAVAILABLE}
)
"""Codes of refusals after which another consultation may succeed."""
REASON_CHARS_MAX: Final = 500
"""Characters of a policy's own reason that a refusal repeats; the full text is in `data`."""

NAME_CHARS_MAX: Final = 100
"""Maximum characters of a wrong name that are compared, and repeated in a refusal."""
NAMES_COMPARED_MAX: Final = 1_000
"""Maximum known names that are compared with a wrong one, since a cluster may have 100,000 nodes.
"""
NAMES_SHOWN_MAX: Final = 5
"""Maximum known names that a refusal lists if none is similar to the wrong one."""
_POLICY_LIKENESS: Final = 0.65
"""Least similarity, 0 to 1, at which an unknown policy is taken for a misspelled known one."""
ALIKE_MAX: Final = 16
"""Maximum names compared letter by letter: those that begin and end most like the wrong name."""


def closest(name: str, known: Iterable[str], count: int) -> list[str]:
    """Return the known names most similar to a wrong one, the closest first.

    Args:
        name: The wrong name; at most `NAME_CHARS_MAX` characters are compared.
        known: The known names; the first `NAMES_COMPARED_MAX` are compared.
        count: Maximum number of names to return.
    """
    name = name[:NAME_CHARS_MAX]

    def alike(other: str) -> int:
        pairs = (zip(name, other, strict=False), zip(name[::-1], other[::-1], strict=False))
        return sum(len([*takewhile(lambda two: two[0] == two[1], each)]) for each in pairs)

    some = heapq.nlargest(ALIKE_MAX, islice(known, NAMES_COMPARED_MAX), key=alike)
    by_letters = {each.casefold(): each for each in some}
    return [by_letters[each] for each in get_close_matches(name.casefold(), by_letters, n=count)]


def closest_policies(uri: str, known: Iterable[str], count: int) -> list[str]:
    """Return the known URIs with names most similar to the wrong URI's, the closest first.

    Versions are compared last, since nearly all versions look alike.
    """
    by_name: dict[str, list[str]] = {}
    for each in known:
        by_name.setdefault(each.partition(":")[0], []).append(each)
    wrong = uri[:NAME_CHARS_MAX].partition(":")[0]
    names = get_close_matches(wrong, by_name, n=count, cutoff=_POLICY_LIKENESS)
    uri = uri[:NAME_CHARS_MAX]
    found = [get_close_matches(uri, by_name[name], n=count, cutoff=0) for name in names]
    return [*chain.from_iterable(found)][:count]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean x?)` if a known name is similar, else an empty text."""
    return "".join(f" (did you mean {each}?)" for each in closest(name, known, 1))


def nearest_or_known(name: str, known: Iterable[str]) -> str:
    """Return the result of `nearest`, or the first known names: ` (there are a, b, …)`."""
    if meant := nearest(name, (names := [*islice(known, NAMES_COMPARED_MAX)])):
        return meant
    shown = [each[:NAME_CHARS_MAX] for each in names[:NAMES_SHOWN_MAX]]
    more = ", …" if len(names) > len(shown) else ""
    return (
        f" (there {'is' if len(names) == 1 else 'are'} {', '.join(shown)}{more})" if names else ""
    )


def _nodes_by_name(name: str, places: Iterable[tuple[str, str]]) -> str:
    """Return ` (did you mean node c/n?)` if nodes have exactly this name, else an empty text."""
    named = (f"{cluster}/{node}" for cluster, node in places if node == name)
    there = " or ".join(islice(named, NAMES_SHOWN_MAX))
    return f" (did you mean node {there}?)" if there else ""


def counted(number: int, what: str) -> str:
    """Return a count of things in words: 1 node, 2 nodes."""
    return f"{number} {what}{'' if number == 1 else 's'}"


# Refusals of a request, before its policy runs -----------------------------------------------


def duplicate_id(request: RequestId) -> Refusal:
    """Another request has this id already."""
    return Refusal(Code.ALREADY_EXISTS, f"Request id {request} is taken.", "id")


def too_many_undecided(most: int, most_bytes: int) -> Refusal:
    """The limit of requests that are being decided is reached."""
    limit = f"{most} requests, or {most_bytes >> 20} MiB of them"
    reason = f"At most {limit}, are decided at one time; try again shortly."
    return Refusal(Code.BUSY, reason)


def too_many_waiting(most: int, most_bytes: int) -> Refusal:
    """The limit of waiters in the queue is reached."""
    limit = f"{most} requests, or {most_bytes >> 20} MiB of them"
    reason = f"At most {limit}, wait at one time; try again later."
    return Refusal(Code.BUSY, reason)


def too_many_choices(most: int) -> Refusal:
    """The limit of different GPU choices among a tenant's waiters is reached."""
    what = f"at most {most} choices of GPU models, labels (`where`) and clusters"
    return Refusal(Code.BUSY, f"The waiting requests of a tenant have {what}; try again later.")


def no_cluster() -> Refusal:
    """The inventory is empty: no cluster is registered, or no registered cluster answers."""
    reason = "No live cluster is registered; register one with POST /clusters."
    return Refusal(Code.UNKNOWN_CLUSTERS, reason, "clusters", "a live cluster")


def no_such_cluster(
    cluster: str, known: Iterable[str], places: Iterable[tuple[str, str]] = ()
) -> Refusal:
    """The inventory has no such cluster; the name may be that of a node."""
    hint = _nodes_by_name(cluster, places) or nearest_or_known(cluster, known)
    reason = f"No live cluster “{cluster}” is registered{hint}."
    return Refusal(Code.UNKNOWN_CLUSTERS, reason, "cluster", "the id of a live cluster")


def no_such_node(
    cluster: str, node: str, known: Iterable[str], places: Iterable[tuple[str, str]] = ()
) -> Refusal:
    """The cluster has no such node; another cluster may have it."""
    hint = _nodes_by_name(node, places) or nearest_or_known(node, known)
    reason = f"Cluster “{cluster}” has no node “{node}”{hint}."
    return Refusal(Code.NOT_FOUND, reason, "node", "the id of a node of this cluster")


def key_of_another(key: str, first: RequestId) -> Refusal:
    """The idempotency key was used with a different request before."""
    reason = f"Idempotency key “{key}” belongs to a different request, {first}."
    expected = "the same request as the first time, or a new key"
    return Refusal(Code.IDEMPOTENCY_MISMATCH, reason, "lease.idempotency_key", expected)


def never_fits(why: str, details: JsonMapping) -> Refusal:
    """The demand would not even fit in an empty fleet."""
    return Refusal(
        Code.NEVER_FITS,
        f"It can never fit: {why}",
        "resources",
        "",
        {"verdict": "never", **details},
    )


def no_capacity(why: str, details: JsonMapping) -> Refusal:
    """No node has room for the demand now."""
    return Refusal(
        Code.NO_CAPACITY,
        f"It does not fit now: {why}",
        "resources",
        "",
        {"verdict": "not_now", **details},
    )


def runs_into_reservation(refusal: Refusal, many: int, seconds: float) -> Refusal:
    """The demand fits for a shorter time only: another tenant's reservation begins."""
    details = {"reserved_in_advance": many, "ttl_max_seconds": round(seconds, 3)}
    why = "The lease would run into a reservation; there is room for a lease of"
    reason = f"{why} {seconds:.0f} s at most (`ttl_max_seconds`)."
    expected = f"at most {seconds:.0f}, or a lease that waits"
    return Refusal(
        Code.NO_CAPACITY, reason, "lease.ttl_seconds", expected, {**refusal.details, **details}
    )


def reserved_for_others(refusal: Refusal, many: int) -> Refusal:
    """No node has room, partly because of other tenants' reservations."""
    are = "is" if many == 1 else "are"
    reason = f"{refusal.reason[:-1]}; {many} {are} reserved for other tenants."
    return replace(refusal, reason=reason, details={**refusal.details, "reserved_in_advance": many})


def ends_too_early() -> Refusal:
    """A reservation would be over before it begins, or is over already."""
    reason = "ends_at: expected a time after `starts_at` and after now."
    return Refusal(Code.BAD_MESSAGE, reason, "ends_at", "a later time")


def too_many_reservations(most: int, nodes: int) -> Refusal:
    """The limit of reservations is reached."""
    reason = f"At most {most} reservations, of {nodes} nodes in all, are possible at one time."
    return Refusal(Code.BUSY, reason)


def no_such_reservation(name: str) -> Refusal:
    """The reservation does not exist, or is over."""
    reason = f"There is no reservation {name}, or it is over."
    return Refusal(Code.NOT_FOUND, reason, "reservation", "the id of a reservation")


def not_free_then(nodes: int, free: int, reserved: int, leased: int) -> Refusal:
    """Too few nodes are free of leases and reservations of others at that time."""
    has, needed = "has" if reserved == 1 else "have", "is" if nodes == 1 else "are"
    others = f"{reserved} {has} reservations, and on {leased} leases of others last longer"
    wanted = f"{counted(nodes, 'node')} {needed} needed"
    reason = f"{wanted}, and {free} can be reserved for that time: {others}."
    details = {"verdict": "not_now", "nodes": nodes, "free": free}
    details |= {"reserved": reserved, "leased": leased}
    return Refusal(Code.NO_CAPACITY, reason, "starts_at", "a later time", details)


def too_many_quotas(most: int) -> Refusal:
    """The limit of quotas is reached."""
    return Refusal(Code.BUSY, f"At most {most} quotas are set at one time; remove some first.")


def over_quota(
    account: tuple[str, str | None],
    resource: str,
    amount: int,
    figures: Mapping[str, int | None],
    reserved: tuple[int, str | None],
) -> Refusal:
    """The request exceeds the quota of the tenant or project; waiting may or may not help.

    Some of the room may be reserved for another request, which is named.
    """
    tenant, project = account
    owner = f"Tenant “{tenant}”"
    if project is not None:
        owner = f"Project “{project}” of tenant “{tenant}”"
    most = (figures["quota"] or 0) + (figures["borrow_max"] or 0)
    never = amount > most
    unit, name = (GPU_MILLI, "GPUs") if resource == "gpu_milli" else (1, field_title(resource))
    quota, borrowed, used, room = (
        f"{(figures[each] or 0) / unit:.12g}" for each in ("quota", "borrow_max", "used", "room")
    )
    may = f"its quota is {quota}, and {borrowed} more may be borrowed"
    held = "1 GPU" if (used, name) == ("1", "GPUs") else f"{used} {name}"
    has = f"has {held} and asks for {amount / unit:.12g} more"
    left = "" if never else f"; {room} are left now"
    details = {"tenant": tenant, "project": project, "resource": resource, "asked": amount}
    details |= dict(figures) | {"verdict": "not_you", "never": never}
    if reserved[0] and not never:
        left += f", and {reserved[0] / unit:.12g} are reserved for request “{reserved[1]}”"
        details |= {"kept": reserved[0], "kept_for": reserved[1]}
    reason = f"{owner} {has}, but {may}{left}."
    return Refusal(
        Code.QUOTA_EXCEEDED,
        reason,
        "resources",
        f"at most {most / unit:.12g} {name} in all",
        details,
    )


# Refusals of a policy's answer ---------------------------------------------------------------


def malformed(error: ProposalError) -> Refusal:
    """The policy's answer is malformed."""
    reason = f"The policy's answer is malformed: {error}."
    return Refusal(Code.POLICY_BAD_OUTPUT, reason, error.field, error.expected)


def unsound(field: str, expected: str, found: str) -> Refusal:
    """The proposal does not meet the request, or names a missing node or device."""
    at = f"{field}: " if field else ""
    reason = f"The policy's proposal is not sound: {at}expected {expected}; {found}."
    return Refusal(Code.POLICY_UNSOUND, reason, field, expected)


def devices_in_use(stale: Refusal) -> Refusal:
    """The policy proposed devices that it saw as taken."""
    reason = f"The policy's proposal is not sound: {stale.reason}"
    return Refusal(Code.POLICY_UNSOUND, reason, "gpus", "free ones", stale.details)


def not_free(node: str, details: JsonMapping) -> Refusal:
    """The proposed devices have been taken since the policy saw them."""
    reason = f"{node} cannot take it: the policy named devices or amounts that are not free."
    return Refusal(Code.CONFLICT, reason, details=_NOT_NOW | dict(details))


def nothing_fits_in(cluster: str) -> Refusal:
    """The proposal names only a cluster, and no node of it has room."""
    return Refusal(Code.CONFLICT, f"No node of “{cluster}” has room now.", details=_NOT_NOW)


def reserved_for_head() -> Refusal:
    """The proposed devices are reserved for another request."""
    reason = "The nodes in the policy's proposal are reserved for other tenants."
    return Refusal(Code.CONFLICT, reason, details=_NOT_NOW)


def others_were_faster(times: int, details: JsonMapping) -> Refusal:
    """Other requests took the proposed devices several times in a row."""
    reason = f"Others took the proposed devices {counted(times, 'time')}; try again."
    return Refusal(Code.CONFLICT, reason, details=_NOT_NOW | dict(details))


def declined(value: JsonValue) -> Refusal:
    """The policy found no placement."""
    why = "its answer is empty"
    if value is None:
        why = "it returned None"
    elif value:
        parts = [each for each in (value if isinstance(value, list) else [value]) if each]
        first = parts[0] if parts and isinstance(parts[0], dict) else {}
        own = first.get("declined") or first.get("error")
        why = "its answer names no “cluster_id”"
        if isinstance(own, str) and own.strip():
            why = own.strip().rstrip(".")[:REASON_CHARS_MAX]
    reason = f"The policy declined: {why}."
    return Refusal(Code.POLICY_DECLINED, reason, details={**_NOT_NOW, "data": value})


# Refusals of a waiter ----------------------------------------------------------------------


def not_waiting(name: RequestId) -> Refusal:
    """No waiter has this id."""
    reason = f"No request {name} is waiting."
    return Refusal(Code.UNKNOWN_REQUEST, reason, "request", "a waiting request")


def cancelled() -> Refusal:
    """The client cancelled the request."""
    return Refusal(Code.CANCELLED, "The request was cancelled.")


def waited(seconds: float, last: Refusal | None, details: JsonMapping, *, patient: bool) -> Refusal:
    """The request's time in the queue has expired."""
    code = Code.WAIT_TIMEOUT if patient else Code.NO_CAPACITY
    reason = f"It waited {seconds:.1f} s and did not fit in that time."
    if last is not None and last.code is Code.POLICY_DECLINED:
        reason = f"It waited {seconds:.1f} s, and its policy declined all that was free."
    over = last is not None and last.code is Code.QUOTA_EXCEEDED
    verdict = "not_you" if over else "not_now"
    return Refusal(code, reason, details={"verdict": verdict, **details})


# Refusals about a lease, and of an inquiry -------------------------------------------------


def lease_over(lease: Lease) -> Refusal:
    """The lease has ended, or is ending."""
    reason = f"Lease {lease.id} is over: {lease.reason}."
    return Refusal(Code.LEASE_ENDED, reason, "lease", "a lease that has not ended")


def no_cursor(after: str) -> Refusal:
    """The cursor is not the `next` of a page of the list."""
    reason = f"after: “{after[:40]}” is not the `next` of a page of this list."
    return Refusal(Code.BAD_MESSAGE, reason, "after", "`next` of the page before")


def no_filter(name: str, known: Sequence[str]) -> Refusal:
    """The list cannot be filtered by this field."""
    expected = f"one of {', '.join(known)}"
    field = f"filters.{name[:40]}"
    reason = f"{field}: expected {expected}{nearest(name, known)}."
    return Refusal(Code.BAD_MESSAGE, reason, field, expected)


def no_state(state: object, known: Sequence[str]) -> Refusal:
    """No lease can have this state."""
    expected = f"one of {', '.join(known)}"
    wrong = str(state)[:40]
    reason = f"state: there is no state “{wrong}”; expected {expected}{nearest(wrong, known)}."
    return Refusal(Code.BAD_MESSAGE, reason, "state", expected)


def unknown_lease(request: RequestId) -> Refusal:
    """No lease has this id."""
    reason = f"There is no lease {request}, or it ended long ago."
    return Refusal(Code.UNKNOWN_LEASE, reason, "lease", "the id of a lease")


def wrong_token(request: RequestId) -> Refusal:
    """The caller does not own the lease."""
    reason = f"No lease of yours has the id {request}, or the token is not its own."
    expected = "the `token` that came with the grant"
    return Refusal(Code.WRONG_TOKEN, reason, "token", expected, {"verdict": "not_you"})
