"""Sends each consultation to the sandbox or another server, and a copy of it to the shadows.

The daemon passes `Consult` and `Forget` effects here, and the core's decision on each answer.
"""

from collections.abc import Callable
from typing import Final

from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.core.state.facts import Granted, Refusal
from moorage.core.turns.effects import Consult, Forget
from moorage.core.turns.events import ConsultFailed, Event, Proposed
from moorage.core.turns.turn import Turn
from moorage.daemon.news.request_progress import RequestProgress
from moorage.daemon.policies.finder import code_of
from moorage.daemon.policies.remote_policies import RemotePolicies
from moorage.daemon.publishing.shadows import Shadows
from moorage.model import Code
from moorage.sandbox.host.sandbox import PolicyCode, Sandbox

CODES_MAX: Final = 256
"""Maximum policies cached in the sandbox's form; when full, the cache is emptied."""


class Consultations:
    """Consults policies for requests, and posts their answers to the core.

    Args:
        catalog: Has the policies.
        sandbox: Executes the policies if `executor` is None.
        executor: Sends consultations to another server instead; None: the sandbox executes them.
        shadows: Repeat consultations with candidate versions, without effect.
        progress: Reports long consultations to clients.
        post: Posts an event to the core.
    """

    def __init__(
        self,
        catalog: Catalog,
        sandbox: Sandbox,
        executor: RemotePolicies | None,
        shadows: Shadows,
        progress: RequestProgress,
        post: Callable[[Event], None],
    ) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._executor = executor
        self._shadows = shadows
        self._progress = progress
        self._post = post
        self._codes: dict[str, tuple[PolicyRecord, PolicyCode]] = {}

    def consult(self, effect: Consult) -> None:
        """Consult the policy of a request; one event with the outcome is posted later."""
        ask = effect.ask
        record = self._catalog.memory.policy(ask.policy.uri)
        if record is None or record.ref != ask.policy:
            reason = f"Policy {ask.policy.uri} was removed while the request waited."
            refusal = Refusal(Code.UNKNOWN_POLICY, reason, "policy_rule_uri")
            self._post(ConsultFailed(ask.id, effect.consultation, refusal))
            return
        self._progress.observe_consultation(ask.id)
        if self._executor is None:
            self._sandbox.consult(effect, self._code_of(record))
        else:
            self._executor.consult(effect, record)
        if self._shadows:
            self._shadows.observe_consultation(effect)

    def _code_of(self, record: PolicyRecord) -> PolicyCode:
        """Return a policy in the sandbox's form; the same object until its record changes."""
        known = self._codes.get(record.ref.uri)
        if known is None or known[0] is not record:
            if len(self._codes) >= CODES_MAX:
                self._codes.clear()
            known = self._codes[record.ref.uri] = (record, code_of(record))
        return known[1]

    def forget(self, effect: Forget) -> None:
        """Cancel a consultation."""
        self._sandbox.forget(effect.request, effect.consultation)
        self._shadows.forget_consultation(effect.request, effect.consultation)
        if self._executor is not None:
            self._executor.forget(effect.request, effect.consultation)

    def note_decision(self, event: Proposed | ConsultFailed, turn: Turn) -> None:
        """Pass the core's decision on an answer to the cells and the shadows.

        Call this before the next `consult`, so that the cells know what is free by then.
        """
        self._progress.note_evaluation(event.request)
        granted = False
        for fact in turn.facts:
            granted = granted or (isinstance(fact, Granted) and fact.lease.id == event.request)
        self._sandbox.settle(event.request, granted)
        if self._shadows:
            self._shadows.note_decision(event, turn)
