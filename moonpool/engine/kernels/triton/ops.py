"""The operations under the names and signatures of `moonpool.engine.kernels.reference`, as the dispatch expects them.

Importing this imports Triton; see `moonpool.engine.kernels.triton.available`. Products of dense weights are the
library's, which is not slow on GPUs.
"""

from moonpool.engine.kernels.triton.attention import chosen_attention, decode_attention, prefill_attention
from moonpool.engine.kernels.triton.experts import add_weighted, expert_linear
from moonpool.engine.kernels.triton.heads import norm_rope_write
from moonpool.engine.kernels.triton.pointwise import norm, rms_norm, rope, silu_mul
from moonpool.engine.kernels.triton.pool import copy_blocks, write_kv
from moonpool.engine.kernels.triton.products import packed_linear
from moonpool.engine.kernels.triton.sparse import choose_keys

__all__ = [
    "add_weighted",
    "choose_keys",
    "chosen_attention",
    "copy_blocks",
    "decode_attention",
    "expert_linear",
    "norm",
    "norm_rope_write",
    "packed_linear",
    "prefill_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]
