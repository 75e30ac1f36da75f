"""The native kernels as Python functions over tensors: the C interface, its argument structures and pointers.

The functions have the names of `kernels.reference`; arguments have been checked by the dispatch. They run on torch's
own OpenMP threads, as many as torch.get_num_threads() says, through the OpenMP library that torch has loaded; where
that is not found they run on the calling thread. No further threads are started.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.native.build import BuildError, build

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
#: Longest head: rows of one token are held on the stack.
MAX_HEAD_DIM = 256

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Attention(ctypes.Structure):
    """struct Attention in pool.h."""

    _fields_ = (
        ("q", _P), ("q_stride", _L), ("q_type", _I),
        ("kv", _P), ("block_stride", _L), ("kv_type", _I),
        ("scales", _P), ("scale_stride", _L),
        ("tables", _P), ("table_stride", _L),
        ("items", _P), ("n", _L), ("heads", _I), ("kv_heads", _I), ("head_dim", _I), ("block_tokens", _I),
        ("scale", _F),
        ("out", _P), ("out_stride", _L),
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "mp_decode": (ctypes.POINTER(_Attention), _I),
    "mp_prefill": (ctypes.POINTER(_Attention), _I),
    "mp_rms_norm": (_I, _P, _L, _P, _P, _F, _P, _L, _L, _I),
    "mp_rope": (_I, _P, _L, _P, _P, _P, _L, _L, _I, _I, _I),
    "mp_silu_mul": (_I, _P, _L, _P, _L, _L, _I),
    "mp_write_kv": (_P, _L, _P, _L, _P, _L, _P, _P, _L, _I, _L, _L, _I),
    "mp_write_quantized": (_I, _P, _L, _P, _L, _I, _P, _L, _P, _L, _P, _P, _L, _I, _I, _I, _I),
    "mp_outside": (_P, _L, _L),
    "mp_copy_blocks": (_P, _L, _L, _L, _L, _P, _P, _L, _I),
    "mp_linear": (_I, _P, _L, _P, _P, _P, _L, _L, _L, _I),
    "mp_threads_used": (_I,),
    "mp_read": (_P, _L, _I),
    "mp_exp": (_P, _L, _L, _I, _I),
}


class Library:
    """One built library. The kernels hold no state but memory that is kept from call to call, per thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._c = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._c, name)
            function.argtypes, function.restype = arguments, _I
        self.openmp = _openmp()
        self._c.mp_init(ctypes.cast(self.openmp, _P) if self.openmp is not None else None)
        self.width = int(self._c.mp_width())
        self.has_bf16 = bool(self._c.mp_has_bf16())

    def decode_attention(
        self,
        q: Tensor,
        kv: Tensor,
        scales: Tensor | None,
        block_tables: Tensor,
        items: Tensor,  # [n, 4] int32: query row, 1, row of the tables, context
        scale: float,
        out: Tensor,
    ) -> None:
        """Attend with one query row per item; see `kernels.reference.decode_attention`."""
        self._attention("mp_decode", q, kv, scales, block_tables, items, scale, out)

    def prefill_attention(
        self,
        q: Tensor,
        kv: Tensor,
        scales: Tensor | None,
        block_tables: Tensor,
        items: Tensor,  # [n, 4] int32: first query row, rows, row of the tables, context
        scale: float,
        out: Tensor,
    ) -> None:
        """Attend with the newest rows of each item; see `kernels.reference.prefill_attention`."""
        self._attention("mp_prefill", q, kv, scales, block_tables, items, scale, out)

    def _attention(
        self,
        name: str,
        q: Tensor,
        kv: Tensor,
        scales: Tensor | None,
        block_tables: Tensor,
        items: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        call = _Attention(
            q.data_ptr(), q.stride(0), TYPES[q.dtype],
            kv.data_ptr(), kv.stride(0) * kv.element_size(), TYPES[kv.dtype],
            None if scales is None else scales.data_ptr(), 0 if scales is None else scales.stride(0),
            block_tables.data_ptr(), block_tables.stride(0),
            items.data_ptr(), items.shape[0], q.shape[1], kv.shape[1], kv.shape[4], kv.shape[3],
            scale,
            out.data_ptr(), out.stride(0),
        )  # fmt: skip
        self._done(getattr(self._c, name)(call, torch.get_num_threads()))

    def write_kv(
        self, k: Tensor, v: Tensor, kv: Tensor, scales: Tensor | None, block_ids: Tensor, offsets: Tensor
    ) -> None:
        """See `kernels.reference.write_kv`."""
        tokens, heads, size = k.shape
        bytes_, threads = k.element_size(), torch.get_num_threads()
        where = (block_ids.data_ptr(), offsets.data_ptr(), tokens)
        if scales is None:
            self._c.mp_write_kv(
                k.data_ptr(), k.stride(0) * bytes_, v.data_ptr(), v.stride(0) * bytes_,
                kv.data_ptr(), kv.stride(0) * bytes_, *where, heads, size * bytes_, kv.shape[3], threads,
            )  # fmt: skip
            return
        self._c.mp_write_quantized(
            TYPES[k.dtype], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            TYPES[kv.dtype], kv.data_ptr(), kv.stride(0), scales.data_ptr(), scales.stride(0),
            *where, heads, size, kv.shape[3], threads,
        )  # fmt: skip

    def outside(self, index: Tensor, limit: int) -> bool:
        """Return whether any of `index` (int64, contiguous) is not in [0, limit)."""
        return bool(self._c.mp_outside(index.data_ptr(), index.numel(), limit))

    def copy_blocks(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        """See `kernels.reference.copy_blocks`."""
        size = pool.element_size()
        block = pool[0, 0].numel() * size if pool.numel() else 0
        self._c.mp_copy_blocks(
            pool.data_ptr(), pool.stride(0) * size, pool.shape[0], pool.stride(1) * size, block,
            source.data_ptr(), target.data_ptr(), source.shape[0], torch.get_num_threads(),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `kernels.reference.rms_norm`."""
        self._c.mp_rms_norm(
            TYPES[x.dtype], x.data_ptr(), x.stride(0), None if residual is None else residual.data_ptr(),
            weight.data_ptr(), eps, out.data_ptr(), x.shape[0], x.shape[1], torch.get_num_threads(),
        )  # fmt: skip

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """See `kernels.reference.rope`."""
        self._c.mp_rope(
            TYPES[x.dtype], x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(), out.stride(0), *x.shape, torch.get_num_threads(),
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `kernels.reference.silu_mul`."""
        self._c.mp_silu_mul(
            TYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), *out.shape,
            torch.get_num_threads(),
        )  # fmt: skip

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See `kernels.reference.linear`."""
        self._done(
            self._c.mp_linear(
                TYPES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(),
                None if bias is None else bias.data_ptr(), out.data_ptr(), x.shape[0], *weight.shape,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def read(self, memory: Tensor) -> None:
        """Read a large tensor once, as fast as it can be: a benchmark's ceiling."""
        self._c.mp_read(memory.data_ptr(), memory.nbytes, torch.get_num_threads())

    def exponentials(self, numbers: Tensor, times: int) -> None:
        """Replace each row of `numbers` [threads, n] float32 by exponentials, `times` times: a benchmark's ceiling."""
        self._c.mp_exp(numbers.data_ptr(), numbers.shape[1], times, 0, numbers.shape[0])

    def threads_used(self, threads: int) -> int:
        """Return how many threads worked on a job of many parts, for tests."""
        return int(self._c.mp_threads_used(threads))

    @staticmethod
    def _done(code: int) -> None:
        if code:
            raise MemoryError("a native kernel found no memory to work in")


class Loader:
    """Builds and loads a library at first use, once, and logs what came of it.

    Attributes:
        loaded: the library, None until it is asked for and where it cannot be had.
        failure: why it cannot be had; "" as long as that was not seen.
    """

    def __init__(self, build: Callable[[], Path] = build) -> None:
        self._build = build
        self._lock = threading.Lock()
        self.loaded: Library | None = None
        self.failure = ""

    def get(self) -> Library | None:
        """Return the library, or None where it cannot be had."""
        if self.loaded is None and not self.failure:
            with self._lock:
                if self.loaded is None and not self.failure:
                    self._load()
        return self.loaded

    def _load(self) -> None:
        try:
            self.loaded = Library(self._build())
            log.info("native kernels: %s", self.loaded.path.name)
        except (BuildError, OSError, AttributeError) as error:
            self.failure = str(error)
            log.warning("native kernels cannot be had, plain torch runs instead: %s", self.failure)


loader = Loader()
"""This process's."""


def get() -> Library | None:
    """Return this machine's library, built if need be, or None where it cannot be had."""
    return loader.get()


def loaded() -> Library | None:
    """Return the library if it has been loaded already."""
    return loader.loaded


def failure() -> str:
    """Return why `get` gave None; empty where it did not."""
    return loader.failure


def _openmp() -> Any:
    """Return GOMP_parallel of the OpenMP library that torch's own operators run on, or None."""
    names = ("libgomp", "libiomp5", "libomp")  # the latter two speak GNU's interface too
    try:
        torch.get_num_threads()
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    # torch's own first: another package may have brought one of its own.
    home = str(Path(torch.__file__).parent)
    for path in sorted(mapped, key=lambda path: (not path.startswith(home), path)):
        if os.path.basename(path).startswith(names):
            try:
                return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
            except (OSError, AttributeError):
                continue
    return None
