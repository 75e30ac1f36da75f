"""Catches what the launch code hands to Triton, and compiles it for a device that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

_TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compiled(target: tuple[str, Any, int], launch: Callable[[Any], None]) -> list[tuple[str, Any]]:
    """Call `launch` with the operations, and return (name, compiled kernel) of what it launched.

    Each must fit into the shared memory that the launch code believes the device to have.
    """
    from kernels.triton import ops
    from kernels.triton.tiles import Limits

    limits = {
        "hip": Limits(304, 64 << 10, stages=2),
        90: Limits(132, 227 << 10, float8=True),
        86: Limits(82, 99 << 10),
    }[target[1] if target[0] == "cuda" else "hip"]
    with caught(limits) as launched:
        launch(ops)
    results = []
    for fn, args, named in launched:
        kernel = _compile(target, fn, args, named)
        assert kernel.metadata.shared <= limits.shared_bytes, fn.__name__
        results.append((fn.__name__, kernel))
    return results


Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel, its arguments, and its constants and options."""


@contextmanager
def caught(limits: Any) -> Iterator[list[Launch]]:
    """Note launches, and run none, on a device with these `limits`."""
    from kernels.triton import attention, device, pointwise, pool, sampling

    launched: list[Launch] = []
    kernels = [(device, "attention"), (device, "join_parts")]
    kernels += [(pool, name) for name in ("_write", "_write_quantized", "_copy")]
    kernels += [(pointwise, name) for name in ("_rms_norm", "_rope", "_silu_mul")]
    kernels += [(sampling, name) for name in ("_weigh", "_sum_runs", "_pick", "_keep_leading")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "limits_of", lambda _: limits)
        for module, name in kernels:
            patch.setattr(module, name, _Caught(getattr(module, name), launched))
        yield launched


def specialised(launch: Launch) -> tuple[Any, ...]:
    """Return what Triton compiles a launch for: two launches with equal results share a compiled kernel."""
    fn, args, named = launch
    found: list[Any] = [fn.__name__]
    for param, value in zip(fn.params, args, strict=False):
        if isinstance(value, Tensor):
            found.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and not param.do_not_specialize:
            found.append((value == 1, value % 16 == 0, value >= 1 << 31))
        else:
            found.append(type(value))
    return *found, *sorted(named.items())


def attend(
    ops: Any,
    *,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    head_dim: int = 128,
    group: int = 4,
    block_tokens: int = 64,
    deterministic: bool = False,
    max_context: int | None = None,
) -> None:
    """Launch attention of two sequences; contents do not matter, nothing runs."""
    kv = torch.empty((4, 2, 2, block_tokens, head_dim), dtype=stored or dtype)
    scales = None if stored is None else torch.empty((4, 2, 2, block_tokens))
    tables = torch.zeros((2, 4096 // block_tokens), dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    q = torch.empty((2 * rows, 2 * group, head_dim), dtype=dtype)
    keywords = {"max_context": max_context, "deterministic": deterministic}
    if rows == 1:
        ops.decode_attention(q, kv, scales, tables, lengths, 0.1, q, **keywords)
    else:
        starts = torch.zeros(3, dtype=torch.int32)
        ops.prefill_attention(q, kv, scales, tables, starts, lengths, 0.1, q, singles=0, **keywords)


def _write(ops: Any, stored: torch.dtype | None = None) -> None:
    k = torch.empty((5, 8, 80), dtype=torch.bfloat16)
    kv = torch.empty((4, 8, 2, 64, 80), dtype=stored or torch.bfloat16)
    ids = torch.zeros(5, dtype=torch.int64)
    ops.write_kv(k, k, kv, None if stored is None else torch.empty((4, 8, 2, 64)), ids, ids)


def _pointwise(ops: Any) -> None:
    x = torch.empty((4, 896), dtype=torch.bfloat16)
    ops.rms_norm(x, None, x[0], 1e-6, x)
    ops.rms_norm(x, x, x[0], 1e-6, x)
    ops.rope(x.view(4, 7, 128), x[:, :128], x[:, :128], x.view(4, 7, 128))
    ops.silu_mul(x, torch.empty((4, 448), dtype=torch.bfloat16))


def _sampling(ops: Any) -> None:
    from kernels.triton import sampling

    logits, weights = torch.empty((2, 9001)), torch.empty((2, 9088))
    sampling.weights_of(logits, logits[:, 0], logits[:, 0], weights)
    for by_weight in (False, True):
        sampling.keep_leading(weights, torch.empty(2, dtype=torch.float64), by_weight=by_weight)
    sampling.pick(weights, torch.zeros(3, dtype=torch.int64), torch.empty(3, dtype=torch.float64))


OTHERS: list[Callable[[Any], None]] = [
    _write,
    lambda ops: _write(ops, torch.int8),
    lambda ops: _write(ops, torch.float8_e4m3fn),
    lambda ops: ops.copy_blocks(torch.empty((2, 4, 64)), *torch.zeros((2, 3), dtype=torch.int64)),
    _pointwise,
    _sampling,
]


@dataclass(frozen=True)
class _Caught:
    """Stands for a kernel; a launch is noted instead."""

    fn: Any
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self.launches.append((self.fn, args, named))
            if self.fn.__name__ == "_pick":
                args[self.fn.arg_names.index("tokens")].zero_()  # what nothing chose is still looked up

        return launch


def _compile(target: tuple[str, Any, int], fn: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Compile `fn` as a launch with these arguments would, every pointer being aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    values = dict(zip(fn.arg_names, args, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        value = values[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        elif value is None or name in named:
            signature[name], constants[i,] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not fn.params[i].do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options)
