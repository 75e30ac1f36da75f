"""The operations under the names and signatures of `kernels.reference`, as the dispatch expects them.

Importing this imports Triton; see `kernels.triton.available`. Products of dense weights are the library's, which is not
slow on GPUs.
"""

from kernels.triton.attention import decode_attention, prefill_attention
from kernels.triton.experts import add_weighted, expert_linear
from kernels.triton.pointwise import rms_norm, rope, silu_mul
from kernels.triton.pool import copy_blocks, write_kv
from kernels.triton.products import packed_linear

__all__ = [
    "add_weighted",
    "copy_blocks",
    "decode_attention",
    "expert_linear",
    "packed_linear",
    "prefill_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]
