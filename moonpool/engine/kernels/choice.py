"""Which implementation runs: chosen per operation, device and element type.

Triton on GPUs; on CPUs the native kernels where they can be built, else plain torch; the reference for other element
types. MOONPOOL_KERNELS=reference|torch|native|triton narrows the choice; "native" and "triton" are refused where they
do not run. No log line is written here: an engine's start says in one line what computes (`moonpool.engine.messages`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from moonpool.base.native import build
from moonpool.engine.kernels import triton
from moonpool.engine.kernels.native import library

Name = Literal["reference", "torch", "native", "triton"]
VARIABLE = "MOONPOOL_KERNELS"
#: Element types that anything but the reference is for.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Operations of Triton that `moonpool.engine.kernels.self_check` found to be wrong on this process's device.
REPLACED: set[str] = set()
#: Those whose implementation in plain torch reads the host, so that CUDA graphs cannot have them.
READS_HOST = frozenset({"attention", "choose_keys", "expert_linear", "norm_rope_write", "recurrent", "write_kv"})
#: Operations whose implementation in plain torch is for CPUs only.
_TORCH_ON_CPU_ONLY = frozenset({"attention"})


def choose(operation: str, device: torch.device, dtype: torch.dtype) -> Name:
    """Return the implementation for `operation` on tensors with `dtype` on `device`.

    Raises:
        ValueError: MOONPOOL_KERNELS has a wrong value, or asks for native kernels that are not available.
    """
    name = choose_by_wish(operation, device, dtype, os.environ.get(VARIABLE, ""))
    if name == "triton" and operation in REPLACED:
        return "reference" if operation in _TORCH_ON_CPU_ONLY else "torch"
    return name


@contextmanager
def replaced(operation: str) -> Iterator[None]:
    """Let plain torch take the place of Triton for `operation` meanwhile."""
    before = operation in REPLACED
    REPLACED.add(operation)
    try:
        yield
    finally:
        if not before:
            REPLACED.discard(operation)


@functools.cache  # asked for every layer of every step; no input ever changes
def choose_by_wish(operation: str, device: torch.device, dtype: torch.dtype, wish: str) -> Name:
    """As `choose`, with the value of MOONPOOL_KERNELS as an argument."""
    if wish and wish not in get_args(Name):
        raise ValueError(f"{VARIABLE}: must be one of {', '.join(get_args(Name))}, not {wish!r}")
    if dtype not in DTYPES or wish == "reference":
        return "reference"
    if wish == "triton" or (not wish and device.type != "cpu"):
        if triton.available(device):
            return "triton"
        if wish:
            raise ValueError(f"{VARIABLE}: Triton does not run on {device} here")
    if device.type == "cpu":
        if wish != "torch" and library.get() is not None:
            return "native"
        if wish == "native":
            raise ValueError(f"{VARIABLE}: native kernels cannot be had: {library.failure()}")
        return "torch"
    return "reference" if operation in _TORCH_ON_CPU_ONLY else "torch"


def prepare(device: torch.device, dtype: torch.dtype) -> str:
    """Build or load what the operations need, ahead of the first call.

    Returns:
        What computes: the implementation, and of native kernels the processor's instructions ("native avx2").
    """
    name = choose("attention", device, dtype)
    return f"native {build.detect()}" if name == "native" else name


def why_not_native(device: torch.device, dtype: torch.dtype) -> str:
    """Return why native kernels do not run there, in a line; "" where they do."""
    if choose("linear", device, dtype) == "native":
        return ""
    wish = os.environ.get(VARIABLE, "")
    if wish:
        return f"{VARIABLE}={wish}"
    if device.type != "cpu":
        return f"the device is {device.type}"
    if dtype not in DTYPES:
        return f"no native kernels for {str(dtype).removeprefix('torch.')}"
    return library.failure().partition("\n")[0]
