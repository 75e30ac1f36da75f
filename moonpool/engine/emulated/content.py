"""Emulated KV and emulated tokens: cheap pure functions of a sequence's tokens, so that tests can check them.

KV of one token, K or V, one head, one layer, is 8 bytes: (pad XOR token), each byte x then replaced by a·x + b mod 256,
with a and b different for each layer and plane. The pad of slot t is bytes 8t..8t+7 of the extendable blake3 output of
the parent block's key. So a block's bytes depend on its tokens, its whole history, namespace, tenant and layer: they
say slot by slot what a block key says, also while the block is not full.
"""

import sys
from array import array
from collections.abc import Collection, Sequence

from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_intdigest

from moonpool.engine.emulated.profile import SLOT_BYTES
from moonpool.kv.keys import tokens_to_bytes
from moonpool.kv.layout import KVLayout
from moonpool.sampling import SampleSpec, stream_seed

_TOKEN_SALT = 0x6D6F6F6E706F6F6C
_MASK = (1 << 64) - 1


class EmulatedKV:
    """Bytes of emulated KV in one layout."""

    def __init__(self, layout: KVLayout) -> None:
        assert layout.head_dim * layout.element_bytes == SLOT_BYTES, "not a layout of emulated KV"
        assert not layout.scale_bytes
        self.layout = layout
        planes = 2 * layout.kv_heads
        self._plane_bytes = layout.block_tokens * SLOT_BYTES
        # a is odd, so that no two bytes become one; no two planes of up to 256 have the same a and b.
        self._tables = [
            [
                bytes((x * (2 * i + 1) + 73 * i) % 256 for x in range(256))
                for i in range(layer * planes, (layer + 1) * planes)
            ]
            for layer in range(layout.layers)
        ]

    def base(self, parent: bytes, token_ids: "array[int]", first_slot: int = 0) -> bytes:
        """Bytes from which the slices of all layers are made: pad XOR token, 8 bytes per slot.

        Args:
            parent: key of the previous block, or the chain's root.
            token_ids: tokens of consecutive slots of one block.
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
        """Writes some slots of a layer slice."""
        begin = first_slot * SLOT_BYTES
        for plane, table in enumerate(self._tables[layer]):
            start = plane * self._plane_bytes + begin
            view[start : start + len(base)] = base.translate(table)

    def wrong_slot(self, view: memoryview, layer: int, base: bytes, first_slot: int = 0) -> int | None:
        """The first slot of a layer slice with wrong bytes; None when all are right."""
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
    """The token that follows a history.

    Args:
        digest: `history_digest` of all tokens before it.
        vocab_size: number of tokens.
        reserved: never chosen.
        banned: not chosen in this position.
        seed: of the sampling; 0 = greedy.
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
    """Seeds that the sampling parameters add to the history, one for each sample; 0 when greedy."""
    if sample.params.temperature == 0:
        return [0] * sample.samples
    return [token_seed(stream_seed(sample.seed, index)) for index in range(sample.samples)]


def token_seed(seed: int) -> int:
    """What a sampling seed adds to the history."""
    return (seed * 0x9E3779B97F4A7C15 + 1) & _MASK


def continuation(
    token_ids: Sequence[int], count: int, vocab_size: int, reserved: Collection[int] = (), *, seed: int = 0
) -> list[int]:
    """The right greedy answer of `count` tokens to a prompt (`seed`: `token_seed`, when not greedy)."""
    digest = xxh3_64(tokens_to_bytes(token_ids))
    answer: list[int] = []
    for _ in range(count):
        answer.append(choose_token(digest.intdigest(), vocab_size, reserved, seed=seed))
        digest.update(tokens_to_bytes(answer[-1:]))
    return answer
