"""The KV that the streaming benchmarks move: its shape, its names, and sequences of it."""

import random
from array import array
from collections.abc import Sequence

from moonpool.kv.keys import BlockKey, block_keys, chain_root, namespace, pack_keys, tokens_to_bytes
from moonpool.kv.layout import KVLayout
from moonpool.v1 import kv_pb2

LAYOUT = KVLayout(layers=8, kv_heads=4, head_dim=64, block_tokens=64, dtype="bfloat16")
"""64 KiB per layer slice: a small model's. Frames near one MiB hold sixteen of them."""
BLOCKS = 128
"""Blocks of one transfer or put: 64 MiB."""
NAMESPACE = namespace(bytes(32), LAYOUT)
ROOT = chain_root(NAMESPACE, "")
VOCAB_SIZE = 1 << 15
TRANSFER_BYTES = BLOCKS * LAYOUT.block_bytes


def tokens(seed: int, count: int = BLOCKS * LAYOUT.block_tokens) -> "array[int]":
    """Tokens unlike those of other seeds."""
    return array("i", random.Random(seed).choices(range(VOCAB_SIZE), k=count))


def keys(token_ids: Sequence[int]) -> list[BlockKey]:
    """Keys of their blocks."""
    return block_keys(ROOT, token_ids, LAYOUT.block_tokens)


def sequence(request_id: str, token_ids: "array[int]") -> kv_pb2.SequenceSpec:
    """A sequence of these tokens, one more to be generated."""
    return kv_pb2.SequenceSpec(
        request_id=request_id,
        token_ids=tokens_to_bytes(token_ids),
        prompt_tokens=len(token_ids),
        block_keys=pack_keys(keys(token_ids)),
        chain_root=ROOT,
        sampling=kv_pb2.Sampling(max_tokens=2, temperature=0.0, top_p=1.0, repetition_penalty=1.0),
    )


def hello(sender: str) -> kv_pb2.StreamHello:
    """First message of a stream of this KV."""
    instance = kv_pb2.Instance(id=sender, incarnation=1, kind=kv_pb2.INSTANCE_KIND_PREFILL)
    return kv_pb2.StreamHello(sender=instance, namespace=NAMESPACE, layout=LAYOUT.to_proto())
