"""One sequence's share of an emulated step: which slots are checked, which are written, and which token follows."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from xxhash import xxh3_64

from moonpool.engine.emulated.content import EmulatedKV, choose_token, sampling_seeds
from moonpool.engine.emulated.profile import EmulatedCompute
from moonpool.kv.keys import BlockKey, block_keys, tokens_to_bytes
from moonpool.kv.pool import KVPool
from moonpool.sched.steps import History, SequenceStep

AGAIN_TOKENS = 64
"""Tokens whose KV is checked again per step: one piece of the prefix in one layer, the next piece in the next step."""


class WrongKV(Exception):  # noqa: N818 - names the finding
    """A block does not hold the KV of its tokens."""


@dataclass(slots=True)
class _Known:
    """State of a sequence between steps."""

    table: tuple[int, ...] = ()
    """Its block table in the last step."""
    tokens: int = 0
    """Leading tokens whose KV in these blocks was checked or written here."""
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the full blocks after those of its history."""
    digest: xxh3_64 = field(default_factory=xxh3_64)
    hashed: int = 0
    """Leading tokens that are in the digest."""
    turn: int = 0
    """Pieces of slices checked again so far."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Consecutive slots of one block, all layers."""

    block: int
    index: int
    """Index of the block in the sequence."""
    first: int
    base: bytes


@dataclass(slots=True)
class Share:
    """Work of one step for one sequence."""

    check: list[Slots]
    """The part of the prefix that was not checked before; checked in every layer."""
    again: tuple[Slots, int] | None
    """A slice checked before and its layer: something may have overwritten it since."""
    write: list[Slots]
    tokens: tuple[int, ...]
    """One for each sample that is wanted."""


class EmulatedSequences:
    """The sequences of one engine."""

    def __init__(self, emulated: EmulatedCompute, kv: EmulatedKV, pool: KVPool) -> None:
        self._emulated = emulated
        self._kv = kv
        self._pool = pool
        self._size = kv.layout.block_tokens
        self._known: WeakKeyDictionary[History, _Known] = WeakKeyDictionary()
        self.slices_checked = 0

    def begin(self, step: SequenceStep) -> bool:
        """Whether this is the sequence's first step here, or its first after an abort; it is known from now on."""
        if step.history is None or step.history in self._known:
            return False
        self._known[step.history] = _Known()
        return True

    def share(self, step: SequenceStep) -> Share:
        """Prepares a step.

        Raises:
            WrongKV: tokens, keys and history contradict each other.
        """
        history = step.history
        if history is None:
            raise WrongKV("the step does not say what its sequence consists of")
        end = step.start + len(step.token_ids) // 4
        if tokens_to_bytes(history.token_ids[step.start : end]) != step.token_ids:
            raise WrongKV(f"tokens {step.start} to {end} are not those of the sequence")
        known = self._known.setdefault(history, _Known())
        right = self._still_right(known, step)
        there = end if step.full_hit else step.start
        check = [self._slots(history, known, step, *span) for span in self._spans(right, there)]
        for slots in check:
            self._check_key(history, slots.index)
        again = self._again(history, known, step, right) if not check else None
        write = [self._slots(history, known, step, *span) for span in self._spans(there, end)]
        return Share(check, again, write, self._tokens(history, known, step, end))

    def run(self, share: Share, layer: int) -> None:
        """Checks the prefix of a layer, then writes the new slots.

        Raises:
            WrongKV: a slot does not hold what it should.
        """
        for slots in share.check:
            self._check(slots, layer)
        if share.again is not None and share.again[1] == layer:
            self._check(share.again[0], layer)
        for slots in share.write:
            self._kv.write(self._pool.slice(layer, slots.block), layer, slots.base, slots.first)

    def done(self, step: SequenceStep, *, aborted: bool) -> None:
        """Notes the end of a step; the sequences of an aborted step are forgotten."""
        assert step.history is not None
        if aborted:
            self._known.pop(step.history, None)
            return
        known = self._known[step.history]
        known.table = step.block_table
        known.tokens = step.start + len(step.token_ids) // 4

    def _still_right(self, known: _Known, step: SequenceStep) -> int:
        """Leading tokens that need no check: checked before, and still in the same blocks."""
        tokens = min(known.tokens, step.start)
        blocks = -(-tokens // self._size)
        if step.block_table[:blocks] == known.table[:blocks]:
            return tokens
        same = next(i for i in range(blocks) if step.block_table[i] != known.table[i])
        return same * self._size

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Positions [begin, end), cut at block borders."""
        while begin < end:
            border = min(end, (begin // self._size + 1) * self._size)
            yield begin, border
            begin = border

    def _slots(self, history: History, known: _Known, step: SequenceStep, begin: int, end: int) -> Slots:
        index = begin // self._size
        base = self._kv.base(self._parent(history, known, index), history.token_ids[begin:end], begin % self._size)
        return Slots(step.block_table[index], index, begin % self._size, base)

    def _parent(self, history: History, known: _Known, index: int) -> bytes:
        """Key of the block before the one at `index`."""
        if index == 0:
            return history.chain_root
        given = len(history.keys)
        if index <= given:
            return history.keys[index - 1]
        while given + len(known.keys) < index:
            at = given + len(known.keys)
            tokens = history.token_ids[at * self._size : (at + 1) * self._size]
            known.keys += block_keys(self._parent(history, known, at), tokens, self._size)
        return known.keys[index - 1 - given]

    def _check_key(self, history: History, index: int) -> None:
        """Checks that a full block's key is the key of the tokens attended to."""
        if index >= len(history.keys):
            return
        parent = history.keys[index - 1] if index else history.chain_root
        tokens = history.token_ids[index * self._size : (index + 1) * self._size]
        if block_keys(parent, tokens, self._size) != [history.keys[index]]:
            raise WrongKV(f"block {index} of the sequence has a key that is not its tokens'")

    def _again(self, history: History, known: _Known, step: SequenceStep, right: int) -> tuple[Slots, int] | None:
        size = min(AGAIN_TOKENS, self._size)
        pieces = right // size  # where the block size is no multiple, the last piece of a block is shorter
        if not pieces:
            return None
        layer, begin = known.turn // pieces % self._kv.layout.layers, known.turn % pieces * size
        known.turn += 1
        return self._slots(history, known, step, *next(self._spans(begin, begin + size))), layer

    def _check(self, slots: Slots, layer: int) -> None:
        self.slices_checked += 1
        wrong = self._kv.wrong_slot(self._pool.slice(layer, slots.block), layer, slots.base, slots.first)
        if wrong is not None:
            raise WrongKV(
                f"block {slots.index} of the sequence (block {slots.block} of the pool) "
                f"does not hold its tokens' KV in layer {layer}, slot {wrong}"
            )

    def _tokens(self, history: History, known: _Known, step: SequenceStep, end: int) -> tuple[int, ...]:
        if step.sample is None:
            return ()
        if known.hashed > end:
            known.digest, known.hashed = xxh3_64(), 0
        known.digest.update(tokens_to_bytes(history.token_ids[known.hashed : end]))
        known.hashed = end
        emulated, digest = self._emulated, known.digest.intdigest()
        return tuple(
            choose_token(digest, emulated.vocab_size, emulated.reserved, step.sample.banned, seed=seed)
            for seed in sampling_seeds(step.sample)
        )
