"""Decode's continuous batching: which sequences get their next token in the next step.

A sequence's blocks are first *promised* (a number), then *bound* (allocated, its KV is coming), then in the batch. The
promise covers the longest possible sequence, so a running one never lacks a block.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.errors import InvalidRequest
from moonpool.kv.keys import BlockKey, tokens_to_bytes
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import History, SequenceStep, Step
from moonpool.v1 import kv_pb2

GOES_ON = kv_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One sequence whose KV is there for all tokens but the last. The caller fills it in; tokens grow here."""

    request_id: str
    token_ids: "array[int]"
    """The prompt and all tokens sampled so far, prefill's first one included; typecode "i". Grows by each step."""
    block_table: list[int]
    """Blocks for the sequence's longest possible life, referred to once by the caller, who releases them at the end."""
    sampling: SequenceSampling
    history: History | None = None
    """For engines that check what blocks hold; has `token_ids` itself, not a copy."""
    in_flight: bool = False
    """In the step that is running."""
    removed: bool = False
    """Wanted no more; leaves when its step is done."""

    @property
    def num_computed(self) -> int:
        """Leading tokens whose KV is in the pool; between steps, all but the last."""
        return len(self.token_ids) - 1

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, counted from the original prompt's end."""
        return len(self.token_ids) - self.sampling.prompt_tokens


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What the engine is to run next."""

    step: Step
    sequences: tuple[DecodeSequence, ...]

    @property
    def context_tokens(self) -> int:
        """Tokens attended to by the step."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sequence's result of a step."""

    sequence: DecodeSequence
    position: int
    """Output position of the token."""
    token_id: int
    finish_reason: "kv_pb2.FinishReason.ValueType"
    """FINISH_REASON_UNSPECIFIED while the sequence goes on; else it has left the scheduler."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the end of a step meant."""

    tokens: tuple[NewToken, ...]
    """One per sequence of the step that is still wanted; empty when the step was aborted."""
    removed: tuple[DecodeSequence, ...]
    """Sequences whose `remove` had waited for this."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room promised to one sequence. Ends by `bind` or `cancel_reservation`, once."""

    held: tuple[int, ...]
    """Leading blocks that are here already, acquired for the sequence."""
    promised: int
    """Further blocks, promised."""


class BatchScheduler:
    """The batch of one decode instance.

    Sequences that have ended (finished or removed) are the caller's again, blocks included: it registers, writes back
    and releases them when nothing reads them any more.
    """

    def __init__(self, blocks: BlockManager, *, block_tokens: int, max_batch: int, max_tokens: int) -> None:
        """Plans over `blocks`.

        Args:
            blocks: Of the instance's pool. All allocation and acquiring goes through `bind` and `reserve`.
            block_tokens: Tokens in a block.
            max_batch: Sequences in a step at most.
            max_tokens: Longest sequence the model takes, prompt and output.
        """
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.max_batch = max_batch
        self.max_tokens = max_tokens
        self._promised = 0
        self._waiting: deque[DecodeSequence] = deque()
        self._running: list[DecodeSequence] = []
        self._sequences: dict[str, DecodeSequence] = {}
        self._plan: DecodeStep | None = None
        self._next_step_id = 1

    # --- promises --------------------------------------------------------------------------------------------------

    @property
    def promised_blocks(self) -> int:
        """Blocks promised and not bound."""
        return self._promised

    def blocks_for(self, sampling: SequenceSampling) -> int:
        """Blocks of the sequence's longest possible life."""
        return -(-sampling.total_tokens(self.max_tokens) // self.block_tokens)

    def promise(self, n: int) -> bool:
        """Promises n blocks, or refuses and changes nothing."""
        assert n >= 0
        if self._promised + n > self.blocks.num_available:
            return False
        self._promised += n
        return True

    def unpromise(self, n: int) -> None:
        """Takes a promise back."""
        assert 0 <= n <= self._promised
        self._promised -= n

    def bind(self, n: int) -> list[int]:
        """Turns a promise of n blocks into blocks, each referred to once. Cannot fail: that is what a promise is."""
        self.unpromise(n)
        return self.blocks.allocate(n)

    def reserve(self, keys: Sequence[BlockKey], total_blocks: int) -> Reservation | None:
        """Acquires the leading blocks that are here already and promises the others, or refuses and changes nothing.

        Args:
            keys: Of the leading blocks that may be reused.
            total_blocks: Blocks of the sequence's longest possible life (`blocks_for`); at least len(keys).
        """
        held = self.blocks.match(keys)
        promised = total_blocks - len(held)
        assert promised >= 0
        # A cached block that is acquired is one that can be allocated no more: it takes room like a promised one.
        room = promised + sum(self.blocks.is_cached(block) for block in held)
        if self._promised + room > self.blocks.num_available:
            return None
        self.blocks.acquire(held)
        self._promised += promised
        return Reservation(tuple(held), promised)

    def bind_reservation(self, reservation: Reservation) -> list[int]:
        """The whole block table of a reserved sequence: held blocks, then new ones."""
        return [*reservation.held, *self.bind(reservation.promised)]

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Gives back a reservation that was never bound."""
        self.unpromise(reservation.promised)
        self.blocks.release(reservation.held)

    # --- the batch -------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a place in the batch."""
        return len(self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens of all sequences, running and waiting."""
        return sum(len(sequence.token_ids) for sequence in self._sequences.values())

    @property
    def step_in_flight(self) -> DecodeStep | None:
        """The step that is running."""
        return self._plan

    def get(self, request_id: str) -> DecodeSequence | None:
        """The sequence, unless it is unknown, ended or removed."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None or sequence.removed else sequence

    def admit(self, sequence: DecodeSequence) -> "kv_pb2.FinishReason.ValueType":
        """Takes in a sequence whose KV is whole; it joins the batch as soon as there is a place.

        Returns:
            FINISH_REASON_UNSPECIFIED when it was taken in; otherwise why it has ended already with its last token (the
            caller keeps it).

        Raises:
            InvalidRequest: The id is running already.
        """
        if sequence.request_id in self._sequences:
            raise InvalidRequest("request_id", f"{sequence.request_id!r} is running already")
        assert len(sequence.token_ids) > sequence.sampling.prompt_tokens
        reason = sequence.sampling.finish(sequence.token_ids, self.max_tokens)
        if reason == GOES_ON:
            assert len(sequence.block_table) >= self.blocks_for(sequence.sampling)
            self._sequences[sequence.request_id] = sequence
            self._waiting.append(sequence)
        return reason

    def remove(self, request_id: str) -> DecodeSequence | None:
        """Takes a sequence out.

        Returns:
            The sequence, when it is quiet and the caller's again; None when it is unknown or in flight (then it comes
            with that step's outcome; tell the two apart by `get` before).
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.in_flight:
            sequence.removed = True
            return None
        self._drop(sequence)
        return sequence

    def plan(self) -> DecodeStep | None:
        """The next step: one token for each sequence of the batch. None when a step is running or no sequence waits."""
        if self._plan is not None:
            return None
        while self._waiting and len(self._running) < self.max_batch:
            self._running.append(self._waiting.popleft())
        if not self._running:
            return None
        for sequence in self._running:
            sequence.in_flight = True
        step = Step(self._next_step_id, tuple(self._step_of(sequence) for sequence in self._running))
        self._next_step_id += 1
        self._plan = DecodeStep(step, tuple(self._running))
        return self._plan

    def step_done(self, sampled: Sequence[int | None], *, aborted: bool = False) -> StepOutcome:
        """The running step is over; `sampled` has a token for each of its sequences unless it was aborted."""
        assert self._plan is not None
        sequences, self._plan = self._plan.sequences, None
        assert aborted or len(sampled) == len(sequences)
        tokens, removed = [], []
        for index, sequence in enumerate(sequences):
            sequence.in_flight = False
            if sequence.removed:
                self._drop(sequence)
                removed.append(sequence)
            elif not aborted:
                token = sampled[index]
                assert token is not None
                tokens.append(self._append(sequence, token))
        return StepOutcome(tuple(tokens), tuple(removed))

    def _append(self, sequence: DecodeSequence, token: int) -> NewToken:
        sequence.token_ids.append(token)
        reason = sequence.sampling.finish(sequence.token_ids, self.max_tokens)
        if reason != GOES_ON:
            self._drop(sequence)
        return NewToken(sequence, sequence.output_tokens - 1, token, reason)

    def _step_of(self, sequence: DecodeSequence) -> SequenceStep:
        tokens = sequence.token_ids
        return SequenceStep(
            token_ids=tokens_to_bytes(tokens[-1:]),
            start=len(tokens) - 1,
            block_table=tuple(sequence.block_table[: -(-len(tokens) // self.block_tokens)]),
            sample=sequence.sampling.at(tokens),
            history=sequence.history,
        )

    def _drop(self, sequence: DecodeSequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls."""
        self.blocks.check_invariants()
        assert 0 <= self._promised <= self.blocks.num_available, "a promise could not be kept"
        assert len(self._running) <= self.max_batch
        present = [*self._running, *self._waiting]
        assert sorted(s.request_id for s in present) == sorted(self._sequences)
        flying = self._plan.sequences if self._plan else ()
        for sequence in present:
            assert sequence.in_flight == (sequence in flying)
            assert not sequence.removed or sequence.in_flight
            assert len(sequence.block_table) * self.block_tokens >= len(sequence.token_ids)
            assert all(self.blocks.ref_count(block) > 0 for block in sequence.block_table)
            assert sequence.sampling.finish(sequence.token_ids, self.max_tokens) == GOES_ON
        assert all(sequence in present for sequence in flying)
