"""Catches what the launch code hands to Triton, and compiles it for GPUs that may be absent. Runs nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moonpool.engine.kernels.triton.tiles import Limits

_TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Gpu:
    """What is compiled for.

    Attributes:
        name: architecture's name.
        target: Triton's target: backend, architecture, threads in a warp.
        limits: what launches are shaped by.
    """

    name: str
    target: tuple[str, Any, int]
    limits: Limits


HOPPER = Gpu("sm_90", ("cuda", 90, 32), Limits(132, 227 << 10, float8=True, warpgroups=True, thirds=True))
AMPERE = Gpu("sm_80", ("cuda", 80, 32), Limits(108, 163 << 10, thirds=True))
AMPERE_SMALL = Gpu("sm_86", ("cuda", 86, 32), Limits(82, 99 << 10, thirds=True))
AMD = Gpu("gfx942", ("hip", "gfx942", 64), Limits(304, 64 << 10, stages=2))


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments, constants and options."""

    fn: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.fn.__name__)

    @property
    def specialised(self) -> tuple[Any, ...]:
        """What Triton compiles a launch for: two launches with equal results share a compiled kernel."""
        found: list[Any] = [self.name]
        for param, value in zip(self.fn.params, self.arguments, strict=False):
            if isinstance(value, Tensor):
                found.append((value.dtype, param.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0))
            elif isinstance(value, int) and not param.do_not_specialize:
                found.append((value == 1, value % 16 == 0, value >= 1 << 31))
            else:
                found.append(type(value))
        return *found, *sorted(self.named.items())


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: per thread.
        shared_bytes: per program.
        stack_bytes: per thread, in memory: spilled registers.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int


@contextmanager
def caught(limits: Limits) -> Iterator[list[Launch]]:
    """Note launches, and run none, on a device with these `limits`."""
    from moonpool.engine.kernels.triton import (
        attention,
        device,
        experts,
        heads,
        pointwise,
        pool,
        products,
        recurrent,
        sampling,
        sparse,
    )

    launched: list[Launch] = []
    kernels = [(device, "attention"), (device, "join_parts")]
    kernels += [(pool, name) for name in ("_write", "_write_quantized", "_copy")]
    kernels += [(heads, "_norm_rope_write")]
    kernels += [(pointwise, name) for name in ("_norm", "_rope", "_silu_mul")]
    kernels += [(products, name) for name in ("_bytes_of_rows", "_packed_product", "_packed_floats")]
    kernels += [(experts, name) for name in ("_expert_product", "_add_weighted")]
    kernels += [(recurrent, name) for name in ("_convolve", "_scan")]
    kernels += [(sampling, name) for name in ("_weigh", "_sum_runs", "_pick", "_keep_leading")]
    kernels += [(sparse, name) for name in ("_sum_by_key", "_choose")]
    with ExitStack() as stack:
        for module in (attention, recurrent, sparse):
            stack.enter_context(patch.object(module, "limits_of", lambda _: limits))
        for module, name in kernels:
            stack.enter_context(patch.object(module, name, _Caught(getattr(module, name), launched)))
        yield launched


@dataclass(frozen=True)
class _Caught:
    """Stands for a kernel; a launch is noted instead."""

    fn: Any
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.launches.append(Launch(self.fn, arguments, named))
            if self.fn.__name__ == "_pick":
                arguments[self.fn.arg_names.index("tokens")].zero_()  # unchosen entries are still looked up

        return launch


def compile_for(gpu: Gpu, launch: Launch) -> Any:
    """Compile a kernel as the launch would, every pointer being aligned where that is asked for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = dict(launch.named)
    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    values = dict(zip(launch.fn.arg_names, launch.arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(launch.fn.params):
        name, value = param.name, values[param.name]
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if not param.do_not_specialize_on_alignment:
                attributes[i,] = [["tt.divisibility", 16]]
        elif value is None or name in named:
            signature[name], constants[i,] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.fn, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*gpu.target), options=options)


def resources_of(kernel: Any) -> Resources:
    """Return what a kernel for a GPU of NVIDIA takes.

    Raises:
        FileNotFoundError: this triton comes without cuobjdump.
    """
    import triton

    path = kernel.metadata_group[f"{kernel.metadata.name}.cubin"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return Resources(int(found[1]), int(kernel.metadata.shared), int(found[2]))
