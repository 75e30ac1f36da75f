"""Where clients' requests meet the core: takes them in, does what the core orders, and tells the clients."""

import itertools
from collections.abc import Callable

from moonpool.core.kernel import Cancel
from moonpool.kv.selection import Selection
from moonpool.telemetry.logs import get_logger
from services.conductor.answer import Answer
from services.conductor.calls import Calls
from services.conductor.core.changes import ChangeRole
from services.conductor.core.failures import Failure, Kind
from services.conductor.core.hot import Replicate
from services.conductor.core.messages import (
    Action,
    Adopt,
    Announce,
    Arrived,
    Ask,
    ClientGone,
    Complete,
    Drop,
    Event,
    Fail,
    Finish,
    LetGo,
    Prefill,
    Rehash,
    Rehashed,
    Renew,
    Reserve,
    Resync,
    Start,
    Stopped,
    Undo,
)
from services.conductor.explain import Decisions, placement
from services.conductor.outgoing import Outgoing
from services.conductor.predictions import Predictions
from services.conductor.recent import Recent
from services.conductor.recording import Opened, Recording
from services.conductor.request import Request
from services.conductor.resume import Resume, secret_for
from services.conductor.serving import Serving
from services.conductor.translate import error_of

log = get_logger(__name__)


class Desk:
    """All requests that the core has not ended.

    Args:
        calls: does what is to be done at instances.
        decisions: remembers placements.
        predictions: compares them with what is measured.
        recent: remembers what was answered.
        recording: of the requests, if there is one.
        order: tells an instance what to do with its keys, and which role to take.
        post: hands an event to the core.
        clock: the core's, seconds.
    """

    def __init__(
        self,
        calls: Calls,
        decisions: Decisions,
        predictions: Predictions,
        recent: Recent,
        recording: Recording | None,
        order: Callable[[Resync | Replicate | ChangeRole], None],
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._decisions = decisions
        self._predictions = predictions
        self._recent = recent
        self._recording = recording
        self._order = order
        self._post = post
        self._serving: dict[int, Serving] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._serving)

    def open(self, answer: Answer, deadline: float, resume: Resume | None = None) -> Serving:
        """Takes a request in, new or resumed; `deadline` is in the clock's seconds."""
        request = answer.request
        ask = Ask(
            number=next(self._numbers),
            id=request.id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            choices=request.sampling.width,
            beams=request.has_beams,
            prompt_key=request.prompt_key,
            slo=request.slo,
            arrived=answer.arrived,
            deadline=deadline,
            tenant=request.tenant,
            scored=request.sampling.prompt_logprobs is not None if resume is None else resume.unscored,
            resumed=resume.resumed if resume is not None else None,
            priority=request.priority,
            weight=request.weight,
            least_tokens=request.least_tokens,
        )
        serving = Serving(
            ask,
            answer,
            self._first_token,
            self._delivered,
            list(request.prompt_keys),
            secret_for(resume),
            self._clock,
        )
        self._serving[ask.number] = serving
        if resume is not None:
            serving.resumed(resume)
        elif self._recording is not None:
            self._recording.opened(opened(ask, request))
        self._post(Arrived(ask, serving.reusable_keys))
        return serving

    def client_left(self, serving: Serving, outgoing: Outgoing) -> None:
        """Who reads these messages has left, or has everything. Another call may have the request by now."""
        if serving.ask.number in self._serving and serving.outgoing is outgoing:
            self._post(ClientGone(serving.ask.number))

    def rejoin(self, serving: Serving, resume: Resume) -> bool:
        """Lets a client whose connection was lost hear its request again, behind what it has; the earlier call ends.

        Returns:
            False when it has ended.

        Raises:
            InvalidRequest: what the client says that it has is not what it was told.
            Unavailable: it has more than is known here yet.
        """
        if serving.ask.number not in self._serving:
            return False
        serving.rejoin(resume)
        return True

    def forget(self, selection: Selection, namespace: bytes) -> None:
        """KV was deleted: of the requests that concern it, nothing that comes from now on is kept."""
        for serving in self._serving.values():
            serving.forget(selection, namespace)

    def stop(self) -> None:
        """Ends all answers here now, with the tokens so far; their sequences stay at decode, for another conductor."""
        for number in list(self._serving):
            self._post(Stopped(number))

    def perform(self, action: Action) -> None:
        """Does what the core orders; waits for nothing. A defect that this meets ends the request that it is for."""
        serving = self._serving.get(getattr(action, "request", 0))
        try:
            self._do(action)
        except Exception:
            if serving is None:
                raise
            order = type(action).__name__
            log.exception("an order cannot be carried out: its request ends", order=order, request=serving.ask.id)
            self._give_up(action, serving)

    def _give_up(self, action: Action, serving: Serving) -> None:
        """An order for a request could not be carried out."""
        failure = Failure(Kind.INTERNAL, "a defect: the conductor cannot serve this request")
        if isinstance(action, Complete | Fail | Drop):  # the core has ended it
            self._serving.pop(action.request, None)
            if not serving.outgoing.ended:
                serving.outgoing.end(error_of(failure))
        else:
            self._post(Stopped(serving.ask.number, failure))

    def _do(self, action: Action) -> None:
        match action:
            case Announce() | Rehash() | Complete() | Fail() | Drop():
                self._tell(action, self._serving[action.request])
            case Reserve():
                self._calls.reserve(action, self._serving[action.request])
            case Prefill():
                self._calls.prefill(action, self._serving[action.request])
            case Start():
                serving = self._serving[action.request]
                serving.started = True
                self._calls.start(action, serving)
            case Adopt():
                serving = self._serving[action.request]
                serving.started = True
                self._decisions.placed(serving.ask.id, serving.placement, ())
                self._calls.adopt(action, serving)
            case Renew():
                self._calls.renew(action)
            case Undo():
                self._calls.undo(action)
            case Resync() | Replicate() | ChangeRole():
                self._order(action)
            case Cancel(io):
                self._calls.cancel(io)
            case LetGo(io):
                self._calls.let_go(io)

    def _tell(self, action: Announce | Rehash | Complete | Fail | Drop, serving: Serving) -> None:
        match action:
            case Announce(_, plan, sequence, target):
                placed = placement(action)
                self._decisions.placed(serving.ask.id, placed, plan.candidates, action.queued_s)
                serving.placed(placed, sequence, target)
                return
            case Rehash():
                self._rehash(action, serving)
                return
            case Complete(_, finish):
                self._complete(finish, serving)
            case Fail(_, failure) if failure.fenced and self._taken_back(serving):
                del self._serving[action.request]
                return
            case Fail():
                self._fail(action, serving)
            case Drop():
                serving.outgoing.end()
        timeline = serving.timeline(over=True)
        self._decisions.ended(serving.ask.id, timeline)
        if isinstance(action, Complete):
            self._recent.add(serving.ask.id, timeline)
        del self._serving[action.request]
        if self._recording is not None:
            self._recording.ended(serving.number, -(-serving.answer.tokens // len(serving.answer.choices)))

    def _taken_back(self, serving: Serving) -> bool:
        """Whether a sequence that another conductor has taken over is this one's again; see `Serving.fenced`."""
        if not serving.fenced(next(self._numbers)):
            return False
        log.warning("taking a sequence back", request=serving.ask.id, resumes=serving.resumes)
        self._serving[serving.ask.number] = serving
        self._post(Arrived(serving.ask, serving.reusable_keys))
        return True

    def _first_token(self, serving: Serving) -> None:
        self._decisions.first_token(serving.ask.id, serving.answer.ttft_s, serving.answer.lane)
        if not serving.ask.beams:  # theirs come with the last ones
            self._predictions.first_token(serving)

    def _delivered(self, serving: Serving) -> None:
        """An answer that was short may have ended before."""
        if serving.ask.number not in self._serving:
            self._decisions.ended(serving.ask.id, serving.timeline(over=True))

    def _complete(self, finish: Finish, serving: Serving) -> None:
        serving.complete(finish)
        self._decisions.complete(serving.ask.id, serving.answer.tpot_s)
        self._predictions.complete(serving)

    def _rehash(self, action: Rehash, serving: Serving) -> None:
        log.warning("placing anew", request=serving.ask.id, failures=action.failures, error=str(action.failure))
        tokens = serving.rehash()
        self._post(Rehashed(action.request, tokens, serving.reusable_keys))

    def _fail(self, action: Fail, serving: Serving) -> None:
        if action.refused:
            self._decisions.refused(serving.ask.id, str(action.failure), action.candidates)
        serving.outgoing.end(error_of(action.failure))


def opened(ask: Ask, request: Request) -> Opened:
    """What a recording takes of a request."""
    return Opened(
        number=ask.number,
        at=ask.arrived,
        prompt_tokens=ask.prompt_tokens,
        block_tokens=request.block_tokens,
        keys=request.prompt_keys,
        prompt_key=request.prompt_key,
        tenant=request.tenant,
        choices=ask.choices,
    )
