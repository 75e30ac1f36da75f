"""A sequence as it arrives at an engine instance: the contract's `SequenceSpec`, checked and unpacked.

Owns which specifications are refused. An engine process must never meet a token it has no row for.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from moonpool.errors import InvalidRequest
from moonpool.kv.keys import KEY_BYTES, BlockKey, tokens_from_bytes, unpack_keys
from moonpool.sched.sampling import SequenceSampling
from moonpool.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A checked sequence.

    Attributes:
        request_id: of the request.
        token_ids: tokens whose KV is wanted; typecode "i".
        keys: keys of their full blocks.
        chain_root: parent of the first key.
        tenant: whose KV it is.
        sampling: how the next tokens are chosen.
    """

    request_id: str
    token_ids: "array[int]"
    keys: Sequence[BlockKey]
    chain_root: BlockKey
    tenant: str
    sampling: SequenceSampling

    @classmethod
    def from_proto(cls, spec: kv_pb2.SequenceSpec, *, block_tokens: int, vocab_size: int, max_tokens: int) -> Self:
        """From the contract.

        Raises:
            InvalidRequest: naming the field at fault.
        """
        tokens = tokens_from_bytes(spec.token_ids, "sequence.token_ids")
        keys = unpack_keys(spec.block_keys, "sequence.block_keys")
        if not spec.request_id:
            raise InvalidRequest("sequence.request_id", "must not be empty")
        if not 1 <= len(tokens) <= max_tokens:
            raise InvalidRequest("sequence.token_ids", f"must be 1 to {max_tokens} tokens, are {len(tokens)}")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise InvalidRequest("sequence.token_ids", f"must be in [0, {vocab_size})")
        if not 1 <= spec.prompt_tokens <= len(tokens):
            raise InvalidRequest("sequence.prompt_tokens", f"must be in [1, {len(tokens)}], is {spec.prompt_tokens}")
        if len(keys) != len(tokens) // block_tokens:
            raise InvalidRequest("sequence.block_keys", f"must be {len(tokens) // block_tokens} keys, are {len(keys)}")
        if len(spec.chain_root) != KEY_BYTES:
            raise InvalidRequest("sequence.chain_root", f"must have {KEY_BYTES} bytes, has {len(spec.chain_root)}")
        sampling = SequenceSampling.from_proto(spec)
        return cls(spec.request_id, tokens, keys, BlockKey(spec.chain_root), spec.tenant, sampling)

    def parents(self) -> list[BlockKey]:
        """The key before each of `keys` in its chain."""
        return [self.chain_root, *self.keys][: len(self.keys)]
