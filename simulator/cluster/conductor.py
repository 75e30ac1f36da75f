"""The life of each request in virtual time: placed, its first token, its end; placed anew when an attempt fails."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.errors import InvalidRequest, Unavailable
from services.conductor.core.plan import Plan
from simulator.cluster.config import ClusterConfig
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.entrance import Entrance
from simulator.cluster.placement import Placement
from simulator.cluster.prefill import PrefillInstance
from simulator.cluster.requests import Attempt, Request
from simulator.kernel.calls import Calls
from simulator.kernel.clock import World, ps

REFUSED = "refused"
TOO_LARGE = "too_large"
GIVEN_UP = "given_up"
DONE = "done"
RETRY_S = 1.0
"""Pause before a request is placed anew after an instance was lost."""


class Conductor:
    """The life of each request: placed, its first token, its end; placed anew when an attempt fails.

    Args:
        ended: called with each request when it has ended.
    """

    def __init__(
        self,
        world: World,
        config: ClusterConfig,
        calls: Calls,
        prefills: Sequence[PrefillInstance],
        decodes: Sequence[DecodeInstance],
        ended: Callable[[Request], None],
    ) -> None:
        self.placement = Placement(config)
        self.entrance = Entrance(config, self.placement.picture)
        self._world, self._config, self._calls = world, config, calls
        self._prefills, self._decodes, self._ended = prefills, decodes, ended
        self._attempts: dict[Request, Attempt] = {}
        self._waiting: dict[int, deque[Attempt]] = {}
        self._asking: dict[int, Attempt] = {}
        self.ended_at = 0
        """When the last request ended."""

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._attempts)

    # The life of a request

    def place(self, request: Request) -> None:
        """Places a request, or ends it."""
        try:
            plan = self.placement.plan(request, self._world.seconds)
        except Unavailable:
            self._world.after(ps(RETRY_S), self._again, request)
        except InvalidRequest:
            self._finish(request, TOO_LARGE)
        else:
            self._go(request, plan)

    def _go(self, request: Request, plan: Plan) -> None:
        if not request.attempts:
            request.predicted_ttft_s = plan.prefill.ttft_s
            able = self.entrance.let_in(plan, self._world.seconds)
            if able is None:
                self._finish(request, REFUSED)
                return
            plan = able
        request.attempts += 1
        self._begin(self._attempt(request, plan), plan)

    def _attempt(self, request: Request, plan: Plan) -> Attempt:
        return Attempt(
            request,
            request.attempts,
            prefill=_number(plan.prefill.id),
            decode=_number(plan.decodes[0].id) if plan.decodes else -1,
            store=_number(plan.prefill.kvstore),
            loaded_blocks=plan.prefill.used_blocks,
            prefill_s=plan.prefill.prefill_s,
            write_to=_number(plan.write_back[0].id) if plan.write_back else -1,
            begun=self._world.now,
            tokens=request.tokens + request.made,
            left=request.answer - request.made,
        )

    def _begin(self, attempt: Attempt, plan: Plan) -> None:
        self._attempts[attempt.request] = attempt
        self.placement.claim(attempt, plan, self._world.seconds)
        first = self._ask if attempt.decode >= 0 else self._submit
        self._calls.send(partial(first, attempt), longer_s=self._config.delays.prompt_s)
        if self._config.deadline_s:
            self._world.after(ps(self._config.deadline_s), self.failed, attempt)

    def _submit(self, attempt: Attempt) -> None:
        instance = self._prefills[attempt.prefill]
        if instance.up and not attempt.over:
            instance.submit(attempt)

    def _ask(self, attempt: Attempt) -> None:
        instance = self._decodes[attempt.decode]
        if instance.up and not attempt.over:
            instance.ask(attempt)

    def asked(self, attempt: Attempt, promised: bool) -> None:
        """A decode instance has answered. Who was refused waits there for room, first come first."""
        decode = attempt.decode
        if promised and not attempt.over:
            self._calls.send(lambda: self._submit(attempt))
        if self._asking.get(decode) is attempt:
            del self._asking[decode]
            if promised:
                self.room(decode)
            else:
                self._waiting[decode].appendleft(attempt)
        elif not promised:
            self._waiting.setdefault(decode, deque()).append(attempt)

    def room(self, decode: int) -> None:
        """Somebody has left a decode instance: the first who waits there asks again."""
        waiting = self._waiting.get(decode)
        while waiting and decode not in self._asking:
            attempt = waiting.popleft()
            if not attempt.over:
                self._asking[decode] = attempt
                self._calls.send(partial(self._ask, attempt), reliable=True)

    def first_token(self, attempt: Attempt) -> None:
        """A prefill instance has the first token of an attempt."""
        request = attempt.request
        if attempt.over:
            return
        if self.entrance.too_late(attempt):
            self._give_up(attempt)
            self._finish(request, REFUSED)
            return
        self.placement.prompt_done(attempt, self._world.seconds)
        self.placement.started(attempt, self._world.seconds)
        now = self._world.now
        if request.made:
            request.intervals.append(now - request.last_at)
        else:
            request.first_at = now
        request.made += 1
        request.last_at = now
        if attempt.decode < 0:
            self.answered(attempt)
        else:
            self._calls.send(lambda: self._decodes[attempt.decode].start(attempt))

    def answered(self, attempt: Attempt) -> None:
        """All tokens have come."""
        if not attempt.over:
            self._close(attempt)
            self._finish(attempt.request, DONE)

    def failed(self, attempt: Attempt) -> None:
        """An attempt cannot go on: what its instances hold comes back, and the request is placed anew."""
        if not attempt.over:
            self._give_up(attempt)
            self._world.after(ps(RETRY_S), self._again, attempt.request)

    def _give_up(self, attempt: Attempt) -> None:
        self._close(attempt)
        self._calls.send(lambda: self._prefills[attempt.prefill].cancel(attempt), reliable=True)
        if attempt.decode >= 0:
            self._calls.send(lambda: self._decodes[attempt.decode].cancel(attempt), reliable=True)

    def _again(self, request: Request) -> None:
        if request.made >= request.answer:
            self._finish(request, DONE)
        elif request.attempts >= self._config.attempts:
            self._finish(request, GIVEN_UP)
        else:
            self.place(request)

    def lost(self, name: str) -> None:
        """An instance is lost: attempts that need it fail."""
        number, prefill = int(name[1:]), name[0] == "p"
        self.placement.lost(name)
        if not prefill:
            self._waiting.pop(number, None)
            self._asking.pop(number, None)
        for attempt in list(self._attempts.values()):
            if attempt.prefill == number and not attempt.whole if prefill else attempt.decode == number:
                self.failed(attempt)

    def store_lost(self, name: str) -> None:
        """A kvstore is replaced by an empty one, if the conductor knows it."""
        if self.placement.knows(name):
            self.placement.joined(name, self._world.seconds)

    def back(self, name: str) -> None:
        """An instance is there again, empty."""
        self.placement.joined(name, self._world.seconds)

    def _close(self, attempt: Attempt) -> None:
        if attempt.decode >= 0:
            self._decodes[attempt.decode].settle()
        attempt.over = True
        self.placement.prompt_done(attempt, self._world.seconds)
        self.placement.answer_done(attempt, self._world.seconds)

    def _finish(self, request: Request, outcome: str) -> None:
        self._attempts.pop(request, None)
        self.placement.over(request, done=outcome == DONE)
        request.outcome, request.ended_at = outcome, self._world.now
        self.ended_at = self._world.now
        self._ended(request)


def _number(name: str) -> int:
    """Of an instance; -1 for none."""
    return int(name[1:]) if name else -1
