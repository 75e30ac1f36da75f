"""Emulated KV and tokens, cheap pure functions of a sequence's tokens; and one sequence's work in an emulated step.

One token's KV, K or V, in one head and layer is 8 bytes: (pad XOR token), each byte x then replaced by a*x + b mod 256,
with a and b different for each layer and plane. Slot t's pad is bytes 8t..8t+7 of the extendable blake3 output for the
parent block's key. So a block's bytes depend on tokens, history, namespace, tenant and layer, and tests can check them
slot by slot, also while the block is not full.
"""

import sys
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_intdigest

from moonpool.base.kv.keys import BlockKey, block_keys, tokens_from_bytes, tokens_to_bytes
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.media import overlapping
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, stream_seed
from moonpool.base.scheduling.steps import SequenceStep, TokenHistory
from moonpool.engine.emulated.profile import SLOT_BYTES, EmulatedCompute

_TOKEN_SALT = 0x6D6F6F6E706F6F6C
_UINT64_MASK = (1 << 64) - 1
RECHECKED_TOKENS = 64
"""Tokens whose KV is checked again per step: one piece of the prefix in one layer, the next piece in the next step."""


class EmulatedKV:
    """Emulated KV bytes in one layout."""

    def __init__(self, layout: KVLayout) -> None:
        (group,) = layout.groups
        assert group.head_dim * group.element_bytes == SLOT_BYTES, "not a layout of emulated KV"
        assert not group.scaled
        self.layout = layout
        planes = group.planes * group.kv_heads
        self._plane_bytes = layout.block_size * SLOT_BYTES
        # a is odd, so that no two bytes become one; no two planes of up to 256 have the same a and b.
        self._tables = [
            [
                bytes((x * (2 * i + 1) + 73 * i) % 256 for x in range(256))
                for i in range(layer * planes, (layer + 1) * planes)
            ]
            for layer in range(layout.layers)
        ]

    def base(self, parent: bytes, token_ids: "array[int]", first_slot: int = 0) -> bytes:
        """Return the bytes from which the slices of all layers are made: pad XOR token, 8 bytes per slot.

        Args:
            parent: key of the previous block, or the chain's root.
            token_ids: tokens for consecutive slots in one block.
            first_slot: slot of the first token.
        """
        size = len(token_ids) * SLOT_BYTES
        pad = blake3(parent).digest(length=size, seek=first_slot * SLOT_BYTES)
        wide = array("q", token_ids)
        if sys.byteorder == "big":
            wide.byteswap()
        mixed = int.from_bytes(pad, "little") ^ int.from_bytes(wide.tobytes(), "little")
        return mixed.to_bytes(size, "little")

    def write(self, view: memoryview, layer: int, base: bytes, first_slot: int = 0) -> None:
        """Write some slots of a layer slice."""
        begin = first_slot * SLOT_BYTES
        for plane, table in enumerate(self._tables[layer]):
            start = plane * self._plane_bytes + begin
            view[start : start + len(base)] = base.translate(table)

    def wrong_slot(self, view: memoryview, layer: int, base: bytes, first_slot: int = 0) -> int | None:
        """Return the first slot of a layer slice with wrong bytes; None when all are right."""
        begin = first_slot * SLOT_BYTES
        for plane, table in enumerate(self._tables[layer]):
            start = plane * self._plane_bytes + begin
            found, wanted = bytes(view[start : start + len(base)]), base.translate(table)
            if found != wanted:
                at = next(i for i in range(len(base)) if found[i] != wanted[i])
                return first_slot + at // SLOT_BYTES
        return None


def choose_token(
    digest: int, vocab_size: int, reserved: Collection[int], banned: Collection[int] = (), *, seed: int = 0
) -> int:
    """Return the token that follows a history.

    Args:
        digest: `history_digest` over all earlier tokens.
        vocab_size: number of tokens.
        reserved: never chosen.
        banned: not chosen in this position.
        seed: the sampling seed; 0 = greedy.
    """
    assert vocab_size > len(reserved) + len(banned), "no token is left to choose"
    state = digest ^ seed if seed else digest
    while True:
        state = xxh3_64_intdigest(state.to_bytes(8, "little"), seed=_TOKEN_SALT)
        token = state % vocab_size
        if token not in reserved and token not in banned:
            return token


def history_digest(token_ids: "Sequence[int] | array[int]") -> int:
    """64-bit digest of a history, the same on every instance and for every batch and chunking."""
    return xxh3_64_intdigest(tokens_to_bytes(token_ids))


def sampling_seeds(sample: SampleSpec) -> list[int]:
    """Return the seeds that the sampling parameters add to the history, one for each sample; 0 when greedy."""
    if sample.params.temperature == 0:
        return [0] * sample.samples
    return [token_seed(stream_seed(sample.seed, index)) for index in range(sample.samples)]


def token_seed(seed: int) -> int:
    """Return what a sampling seed adds to the history."""
    return (seed * 0x9E3779B97F4A7C15 + 1) & _UINT64_MASK


def continuation(
    token_ids: Sequence[int], count: int, vocab_size: int, reserved: Collection[int] = (), *, seed: int = 0
) -> list[int]:
    """Return the right greedy answer of `count` tokens to a prompt (`seed`: `token_seed`, when not greedy)."""
    digest = xxh3_64(tokens_to_bytes(token_ids))
    answer: list[int] = []
    for _ in range(count):
        answer.append(choose_token(digest.intdigest(), vocab_size, reserved, seed=seed))
        digest.update(tokens_to_bytes(answer[-1:]))
    return answer


def seen_tokens(history: TokenHistory, begin: int, end: int) -> "array[int]":
    """The tokens [begin, end) as the emulated model sees them: those of a picture are words of its digest."""
    tokens = history.token_ids[begin:end]
    for item in overlapping(history.media, begin, end):
        words = tokens_from_bytes(item.digest)
        for position in range(max(begin, item.begin), min(end, item.end)):
            tokens[position - begin] = words[(position - item.begin) % len(words)]
    return tokens


class WrongKV(Exception):  # noqa: N818 - names the finding
    """A block does not hold the tokens' KV."""


@dataclass(slots=True)
class _SequenceState:
    """State of a sequence between steps."""

    table: tuple[int, ...] = ()
    """The block table in the last step."""
    tokens: int = 0
    """Leading tokens whose KV in these blocks was checked or written here."""
    keys: list[BlockKey] = field(default_factory=list)
    """Keys for the full blocks after the history's."""
    digest: xxh3_64 = field(default_factory=xxh3_64)
    hashed: int = 0
    """Leading tokens that are in the digest."""
    turn: int = 0
    """Pieces of slices checked again so far."""


@dataclass(frozen=True, slots=True)
class BlockSlots:
    """Consecutive slots in one block, all layers."""

    block: int
    index: int
    """Index of the block in the sequence."""
    first: int
    base: bytes


@dataclass(slots=True)
class SequenceWork:
    """One step's work for one sequence."""

    check: list[BlockSlots]
    """The part of the prefix that was not checked before; checked in every layer."""
    again: tuple[BlockSlots, int] | None
    """A slice checked before, and the slice's layer: the slice may have been overwritten since."""
    write: list[BlockSlots]
    tokens: tuple[int, ...]
    """One for each sample that is wanted."""


class EmulatedSequences:
    """One engine's sequences."""

    def __init__(self, emulated: EmulatedCompute, kv: EmulatedKV, pool: KVPool) -> None:
        self._emulated = emulated
        self._kv = kv
        self._pool = pool
        self._size = kv.layout.block_size
        self._known: WeakKeyDictionary[TokenHistory, _SequenceState] = WeakKeyDictionary()
        self.slices_checked = 0

    def begin(self, step: SequenceStep) -> bool:
        """Tell whether this is the sequence's first step here, or the first after an abort; afterwards it is known."""
        if step.history is None or step.history in self._known:
            return False
        self._known[step.history] = _SequenceState()
        return True

    def share(self, step: SequenceStep) -> SequenceWork:
        """Prepare a step.

        Raises:
            WrongKV: tokens, keys and history contradict each other.
        """
        history = step.history
        if history is None:
            raise WrongKV("the step does not say what its sequence consists of")
        end = step.start + len(step.token_ids) // 4
        if tokens_to_bytes(history.token_ids[step.start : end]) != step.token_ids:
            raise WrongKV(f"tokens {step.start} to {end} are not those of the sequence")
        known = self._known.setdefault(history, _SequenceState())
        right = self._still_right(known, step)
        there = end if step.full_hit else step.start
        check = [self._slots(history, known, step, *span) for span in self._spans(right, there)]
        for slots in check:
            self._check_key(history, slots.index)
        again = self._again(history, known, step, right) if not check else None
        write = [self._slots(history, known, step, *span) for span in self._spans(there, end)]
        return SequenceWork(check, again, write, self._tokens(history, known, step, end))

    def run(self, share: SequenceWork, layer: int) -> None:
        """Check the prefix of a layer, then write the new slots.

        Raises:
            WrongKV: a slot holds unexpected bytes.
        """
        for slots in share.check:
            self._check(slots, layer)
        if share.again is not None and share.again[1] == layer:
            self._check(share.again[0], layer)
        for slots in share.write:
            self._kv.write(self._pool.slice(layer, slots.block), layer, slots.base, slots.first)

    def done(self, step: SequenceStep, *, aborted: bool) -> None:
        """Note the end of a step; the sequences of an aborted step are forgotten."""
        assert step.history is not None
        if aborted:
            self._known.pop(step.history, None)
            return
        known = self._known[step.history]
        known.table = step.block_table
        known.tokens = step.start + len(step.token_ids) // 4

    def _still_right(self, known: _SequenceState, step: SequenceStep) -> int:
        """Leading tokens that need no check: checked before, and still in the same blocks."""
        tokens = min(known.tokens, step.start)
        blocks = -(-tokens // self._size)
        if step.block_table[:blocks] == known.table[:blocks]:
            return tokens
        same = next(i for i in range(blocks) if step.block_table[i] != known.table[i])
        return same * self._size

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Return the positions [begin, end), cut at block borders."""
        while begin < end:
            border = min(end, (begin // self._size + 1) * self._size)
            yield begin, border
            begin = border

    def _slots(
        self, history: TokenHistory, known: _SequenceState, step: SequenceStep, begin: int, end: int
    ) -> BlockSlots:
        index = begin // self._size
        base = self._kv.base(self._parent(history, known, index), seen_tokens(history, begin, end), begin % self._size)
        return BlockSlots(step.block_table[index], index, begin % self._size, base)

    def _parent(self, history: TokenHistory, known: _SequenceState, index: int) -> bytes:
        """Key of the block before `index`."""
        if index == 0:
            return history.chain_root
        given = len(history.keys)
        if index <= given:
            return history.keys[index - 1]
        while given + len(known.keys) < index:
            at = given + len(known.keys)
            tokens = history.token_ids[at * self._size : (at + 1) * self._size]
            parent, first = self._parent(history, known, at), at * self._size
            known.keys += block_keys(parent, tokens, self._size, history.media, first)
        return known.keys[index - 1 - given]

    def _check_key(self, history: TokenHistory, index: int) -> None:
        """Check that a full block's key is the key of the tokens attended to."""
        if index >= len(history.keys):
            return
        parent = history.keys[index - 1] if index else history.chain_root
        tokens = history.token_ids[index * self._size : (index + 1) * self._size]
        if block_keys(parent, tokens, self._size, history.media, index * self._size) != [history.keys[index]]:
            raise WrongKV(f"block {index} of the sequence has a key that is not its tokens'")

    def _again(
        self, history: TokenHistory, known: _SequenceState, step: SequenceStep, right: int
    ) -> tuple[BlockSlots, int] | None:
        size = min(RECHECKED_TOKENS, self._size)
        pieces = right // size  # where the block size is no multiple, the last piece of a block is shorter
        if not pieces:
            return None
        layer, begin = known.turn // pieces % self._kv.layout.layers, known.turn % pieces * size
        known.turn += 1
        return self._slots(history, known, step, *next(self._spans(begin, begin + size))), layer

    def _check(self, slots: BlockSlots, layer: int) -> None:
        self.slices_checked += 1
        wrong = self._kv.wrong_slot(self._pool.slice(layer, slots.block), layer, slots.base, slots.first)
        if wrong is not None:
            raise WrongKV(
                f"block {slots.index} of the sequence (block {slots.block} of the pool) "
                f"does not hold its tokens' KV in layer {layer}, slot {wrong}"
            )

    def _tokens(self, history: TokenHistory, known: _SequenceState, step: SequenceStep, end: int) -> tuple[int, ...]:
        if step.sample is None:
            return ()
        if known.hashed > end:
            known.digest, known.hashed = xxh3_64(), 0
        known.digest.update(tokens_to_bytes(seen_tokens(history, known.hashed, end)))
        known.hashed = end
        emulated, digest = self._emulated, known.digest.intdigest()
        if step.sample.forced is not None:
            return (step.sample.forced,) * step.sample.samples
        return tuple(
            choose_token(digest, emulated.vocab_size, emulated.reserved, step.sample.banned, seed=seed)
            for seed in sampling_seeds(step.sample)
        )
