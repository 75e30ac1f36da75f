"""Every event in any order, late ones too: each request ends once, everything comes back, nothing is computed twice."""

import pickle
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.conductor.core.actions import CallPrefill, CallReserve, StartDecode, TakeOverSequence
from moonpool.conductor.core.events import ClientGone, CompletionReason, KVDelivered, StalePlacement, StopRequested
from moonpool.conductor.core.failures import STALE, Failure, FailureKind
from moonpool.conductor.core.request_spec import SloLimits
from tests.examples import examples

from .world import BLOCK, NO_ROOM, World

FAILURES = [Failure(kind, "a test says so") for kind in FailureKind if kind is not FailureKind.OVERLOADED]
STALE_QUEUE = Failure(FailureKind.OVERLOADED, "the prompts there take longer", reason=STALE)
REFUSALS = [NO_ROOM, Failure(FailureKind.OVERLOADED, "slow", reason="tbt_slo", predicted_tbt_s=1.0)]
FINISH = st.none() | st.none() | st.sampled_from([CompletionReason.STOP, CompletionReason.LENGTH])
KEYS = tuple(bytes([number]) * 32 for number in range(7))
SEVERAL = [(1, False), (1, False), (1, False), (2, False), (1, True), (2, True)]
"""Answers that run together, and whether they are deferred."""
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")


def untold(number: int) -> StopRequested:
    """A request's tokens cannot be told."""
    return StopRequested(number, Failure(FailureKind.INTERNAL, "a defect"))


class RequestMachine(RuleBasedStateMachine):
    """Requests, calls and instances, as a shell might tell of them."""

    prefills, boths = 2, 0
    """Prefill instances at the beginning; decode instances in the role both, the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(prefills=self.prefills, decodes=3, total=8, decode_prompt_tokens=24, boths=self.boths)
        self.epochs = dict.fromkeys(NAMES, 1)
        self.held = dict.fromkeys(NAMES, 0)
        self.blocks: dict[int, int] = {}
        """Full blocks of each prompt."""
        for name in NAMES[2:]:
            self.holds(name, len(KEYS))

    def is_both(self, name: str) -> bool:
        return name in NAMES[len(NAMES) - self.boths :]

    @rule(
        prompt=st.integers(1, 100),
        answer=st.integers(1, 40),
        limit_s=st.sampled_from([0.5, 20.0, 600.0, 600.0, 600.0]),
        ttft_s=st.sampled_from([None, None, 0.05, 0.5, 3.0]),
        queue_s=st.sampled_from([0.0, 0.0, 1.0, 30.0]),
        tenant=st.sampled_from("ab"),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        several=st.sampled_from(SEVERAL),
    )
    def arrive(
        self,
        prompt: int,
        answer: int,
        limit_s: float,
        ttft_s: float | None,
        queue_s: float,
        tenant: str,
        priority: int,
        several: tuple[int, bool],
    ) -> None:
        if len(self.world.core.scheduler) < 6:
            keys = KEYS[: prompt // BLOCK]
            slo, (choices, deferred) = SloLimits(ttft_s=ttft_s, queue_s=queue_s), several
            asked = {"prompt": prompt, "answer": answer, "limit_s": limit_s, "keys": keys, "choices": choices}
            number = self.world.arrive(**asked, deferred=deferred, slo=slo, tenant=tenant, priority=priority)  # type: ignore[arg-type]
            self.blocks[number] = len(keys)

    @rule(name=st.sampled_from(NAMES), blocks=st.integers(0, len(KEYS)))
    def holds_other_blocks(self, name: str, blocks: int) -> None:
        if name in self.world.members:
            self.holds(name, blocks)

    @rule(
        name=st.sampled_from(NAMES[2:]),
        restarted=st.sampled_from([False, False, True]),
        tokens=st.integers(0, 5),
        answer=st.integers(6, 40),
        several=st.sampled_from(SEVERAL),
    )
    def resume(self, name: str, restarted: bool, tokens: int, answer: int, several: tuple[int, bool]) -> None:
        if len(self.world.core.scheduler) < 6:
            epoch, (choices, deferred) = self.epochs[name] - restarted, several
            self.world.resume(name, epoch=epoch, tokens=tokens, answer=answer, choices=choices, deferred=deferred)

    @precondition(lambda self: self.world.calls)
    @rule(data=st.data(), steps=st.integers(1, 8))
    def all_goes_well(self, data: st.DataObject, steps: int) -> None:
        """Some calls give what they should: otherwise chaos would end most requests before they decode."""
        for _ in range(steps):
            calls = [*self.world.open(CallReserve), *self.fresh_prefills(), *self.sequences()]
            if not calls:
                return
            call = data.draw(st.sampled_from(calls))
            match call:
                case CallReserve() if self.there(call):
                    held = min(self.held[call.decode], self.blocks.get(call.request, 0))
                    self.world.promise(call, lease_s=3.0, held=held)
                case CallPrefill():
                    self.world.first_token(call, CompletionReason.LENGTH if call.target is None else None)
                case StartDecode() | TakeOverSequence():
                    if isinstance(call, StartDecode) and call.plan is not None and data.draw(st.booleans()):
                        self.world.prompt_computed(call)
                    self.world.more(call)

    @precondition(lambda self: self.calls(CallReserve))
    @rule(data=st.data(), lease_s=st.sampled_from([0.0, 3.0, 60.0]), restarted=st.sampled_from([False] * 5 + [True]))
    def promise(self, data: st.DataObject, lease_s: float, restarted: bool) -> None:
        call = data.draw(st.sampled_from(self.calls(CallReserve)))
        assert isinstance(call, CallReserve)
        self.world.promise(call, epoch=call.epoch + restarted, lease_s=lease_s)

    @precondition(lambda self: self.calls(CallReserve))
    @rule(data=st.data(), why=st.sampled_from(REFUSALS * 4 + FAILURES))
    def refuse(self, data: st.DataObject, why: Failure) -> None:
        call = data.draw(st.sampled_from(self.calls(CallReserve)))
        assert isinstance(call, CallReserve)
        self.world.end(call, STALE_QUEUE if why is REFUSALS[1] and call.max_queue_s is not None else why)

    @precondition(lambda self: self.fresh_prefills())
    @rule(data=st.data(), finish=FINISH)
    def first_token(self, data: st.DataObject, finish: CompletionReason | None) -> None:
        call = data.draw(st.sampled_from(self.fresh_prefills()))
        self.world.first_token(call, CompletionReason.LENGTH if call.target is None else finish)

    @precondition(lambda self: self.fresh_prefills())
    @rule(data=st.data(), drain_s=st.sampled_from([0.0, 0.02, 5.0]))
    def not_taken(self, data: st.DataObject, drain_s: float) -> None:
        self.world.end(data.draw(st.sampled_from(self.fresh_prefills())), StalePlacement(drain_s, 0))

    @precondition(lambda self: self.calls(CallPrefill))
    @rule(data=st.data(), well=st.booleans(), why=st.sampled_from(FAILURES))
    def end_prefill(self, data: st.DataObject, well: bool, why: Failure) -> None:
        call = data.draw(st.sampled_from(self.calls(CallPrefill)))
        if well:
            self.world.post(KVDelivered(call.io))
        self.world.end(call, None if well else why)

    @precondition(lambda self: self.sequences())
    @rule(data=st.data(), count=st.integers(1, 5), finish=FINISH, known=st.booleans())
    def tokens(self, data: st.DataObject, count: int, finish: CompletionReason | None, known: bool) -> None:
        call = data.draw(st.sampled_from(self.sequences()))
        self.world.more(call, count, finish, known=known and finish is not None)
        if known and finish is not None:
            self.world.end(call)

    @precondition(lambda self: self.late_sequences())
    @rule(data=st.data())
    def late_tokens(self, data: st.DataObject) -> None:
        """Tokens that were under way when their attempt ended: the answer has them, the keys are asked for later."""
        self.world.more(data.draw(st.sampled_from(self.late_sequences())))

    @precondition(lambda self: self.calls(StartDecode) + self.calls(TakeOverSequence))
    @rule(data=st.data(), why=st.sampled_from([None, *FAILURES]))
    def end_sequence(self, data: st.DataObject, why: Failure | None) -> None:
        self.world.end(data.draw(st.sampled_from(self.calls(StartDecode) + self.calls(TakeOverSequence))), why)

    @precondition(lambda self: self.world.rehashes)
    @rule(data=st.data())
    def rehash(self, data: st.DataObject) -> None:
        self.world.rehash(data.draw(st.sampled_from(self.world.rehashes)))

    @precondition(lambda self: self.world.arrived)
    @rule(data=st.data(), event=st.sampled_from([ClientGone, StopRequested, untold, None, None, None, None]))
    def leave_or_stop(self, data: st.DataObject, event: Callable[[int], ClientGone | StopRequested] | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.arrived)[-4:]))
        if event is not None:
            self.world.post(event(number))

    @rule(name=st.sampled_from(NAMES), lost=st.sampled_from(["is lost", "was restarted", ""]))
    def instance_leaves(self, name: str, lost: str) -> None:
        if name in self.world.members:
            self.world.leave(name, lost)

    @rule(name=st.sampled_from(NAMES), again=st.booleans())
    def instance_joins(self, name: str, again: bool) -> None:
        if name in self.world.members:
            return
        self.epochs[name] += not again
        self.held[name] = 0
        if name.startswith("prefill"):
            self.world.join_prefill(name, self.epochs[name])
        else:
            self.world.join_decode(name, self.epochs[name], total=8, both=self.is_both(name))

    @rule(name=st.sampled_from(NAMES), free=st.integers(0, 8))
    def report(self, name: str, free: int) -> None:
        load: dict[str, Any] = {"drain_s": 0.1, "queued_tokens": 100} if self.is_both(name) else {}
        self.world.report(name, free, **load)

    @rule(name=st.sampled_from(NAMES), draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        """Or it was found slow, which has the same effect; it may be well again."""
        self.world.drain(name, draining=draining)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.3, 0.3, 1.1, 1.1, 2.5, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.sleep(seconds)

    @rule()
    def a_copy_takes_over(self) -> None:
        """The state is plain: a journal's snapshot decides on in the same way."""
        before = self.world.core
        self.world.core = pickle.loads(pickle.dumps(before))
        assert self.world.core.digest() == before.digest()

    @invariant()
    def nobody_is_forgotten(self) -> None:
        due = self.world.core.due()
        assert due is not None or not len(self.world.core.scheduler), "every wait has a deadline"

    def teardown(self) -> None:
        self.world.finish_all()

    def holds(self, name: str, blocks: int) -> None:
        """So the ends of prompts may be computed there, if it is a decode instance."""
        self.held[name] = blocks
        self.world.holds(name, KEYS[:blocks])

    def sequences(self) -> list[StartDecode | TakeOverSequence]:
        return [*self.world.open(StartDecode), *self.world.open(TakeOverSequence)]

    def calls(
        self, kind: type[CallReserve] | type[CallPrefill] | type[StartDecode] | type[TakeOverSequence]
    ) -> list[CallReserve | CallPrefill | StartDecode | TakeOverSequence]:
        """Calls of a kind that have not ended, also those that were given up: their ends come late."""
        return [call for call in self.world.calls.values() if isinstance(call, kind)]

    def there(self, call: CallReserve) -> bool:
        present = self.world.members.get(call.decode)
        return present is not None and present.epoch == call.epoch

    def fresh_prefills(self) -> list[CallPrefill]:
        return [call for call in self.world.open(CallPrefill) if call.io not in self.world.given]

    def late_sequences(self) -> list[StartDecode | TakeOverSequence]:
        world = self.world
        calls = [
            call
            for call in world.calls.values()
            if isinstance(call, StartDecode | TakeOverSequence) and call.io in world.cancelled
        ]
        return [call for call in calls if call.request in world.rehashes]


class BothMachine(RequestMachine):
    """The same where no prefill instance is there at first, and most decode instances compute prompts."""

    prefills, boths = 0, 2


TestRequests = RequestMachine.TestCase
TestRequests.settings = settings(max_examples=examples(60), stateful_step_count=50)
TestRequestsOfBoth = BothMachine.TestCase
TestRequestsOfBoth.settings = TestRequests.settings
