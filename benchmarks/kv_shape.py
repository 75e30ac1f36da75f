"""The KV that the streaming benchmarks move: shape, names, and sequences."""

import dataclasses
import random
from array import array
from collections.abc import Sequence
from functools import cached_property

from moonpool.base.kv.keys import BlockKey, block_keys, chain_root, namespace, pack_keys, tokens_to_bytes
from moonpool.base.kv.layout import KVLayout
from moonpool.v1 import kv_pb2

VOCAB_SIZE = 1 << 15


@dataclasses.dataclass(frozen=True)
class Shape:
    """One model's KV, and the blocks per transfer or put."""

    layout: KVLayout
    blocks: int

    @cached_property
    def namespace(self) -> bytes:
        """Of all benchmarks' KV of this shape."""
        return namespace(bytes(32), self.layout)

    @cached_property
    def root(self) -> bytes:
        """Parent of every chain's first block."""
        return chain_root(self.namespace, "")

    @property
    def transfer_bytes(self) -> int:
        """Bytes per transfer or put."""
        return self.blocks * self.layout.block_bytes

    def tokens(self, seed: int) -> "array[int]":
        """As many as the blocks have, unlike those of other seeds."""
        count = self.blocks * self.layout.block_size
        return array("i", random.Random(seed).choices(range(VOCAB_SIZE), k=count))

    def keys(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Keys of their blocks."""
        return block_keys(self.root, token_ids, self.layout.block_size)

    def sequence(self, request_id: str, token_ids: "array[int]") -> kv_pb2.SequenceSpec:
        """A sequence with these tokens, one more to be generated."""
        return kv_pb2.SequenceSpec(
            request_id=request_id,
            token_ids=tokens_to_bytes(token_ids),
            prompt_tokens=len(token_ids),
            block_keys=pack_keys(self.keys(token_ids)),
            chain_root=self.root,
            sampling=kv_pb2.Sampling(max_tokens=2, temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        )

    def hello(self, sender: str) -> kv_pb2.StreamHello:
        """First message on a stream with this KV."""
        instance = kv_pb2.Instance(id=sender, epoch=1, kind=kv_pb2.INSTANCE_KIND_PREFILL)
        return kv_pb2.StreamHello(sender=instance, namespace=self.namespace, layout=self.layout.to_proto())


SMALL = Shape(KVLayout.uniform(layers=8, kv_heads=4, head_dim=64, block_size=64, dtype="bfloat16"), 128)
"""64 KiB per layer slice: a small model's. Frames near one MiB hold sixteen slices. 64 MiB."""
HALF_B = Shape(KVLayout.uniform(layers=24, kv_heads=2, head_dim=64, block_size=64, dtype="bfloat16"), 32)
"""A prompt of 2,048 tokens of Qwen2.5-0.5B: 24 MiB, 1 MiB of each layer."""
SHAPES = {"small": SMALL, "0.5b": HALF_B}
