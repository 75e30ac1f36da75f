"""The operations of `kernels.reference` in Triton, for GPUs; docs/gpu_check.md tells what an H100 showed.

`moonpool.engine.kernels.triton.ops` has the operations under the same names.

Importing this package costs nothing: Triton is imported with `moonpool.engine.kernels.triton.ops`, which only a process
that found `available` may do.
"""

from __future__ import annotations

import importlib.util
import os

import torch

#: Element types of queries and results. KV is in the same type, or int8 or float8_e4m3fn with scales.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Longest head that the tiles of `moonpool.engine.kernels.triton.tiles` are meant for.
MAX_HEAD_DIM = 512
#: The same of latent vectors: elements of a value, and those behind it.
MAX_VALUE_DIM, MAX_REST = 512, 128


def available(device: torch.device | str) -> bool:
    """Return whether the kernels run on `device`: Triton is installed, and there is a GPU or an interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    # Triton reads the variable when a kernel is defined.
    return is_gpu(device) or os.environ.get("TRITON_INTERPRET") == "1"


#: Tokens of a recurrent layer that are computed together: blocks hold a multiple.
CHUNK = 16


def takes_latent(value_dim: int, rest: int) -> bool:
    """Return whether attention takes latent vectors with `rest` elements behind the `value_dim` ones of a value."""
    return value_dim <= MAX_VALUE_DIM and 0 < rest <= MAX_REST


def is_gpu(device: torch.device | str) -> bool:
    """Return whether `device` is a GPU; PyTorch calls AMD's devices "cuda" too."""
    return torch.device(device).type == "cuda"
