"""The native kernels as Python functions over tensors: the C interface and pointers.

The functions have the names of `moonpool.engine.kernels.reference`; arguments have been checked by the dispatch. The
kernels run on a separate thread team (`team.cpp`), as many as torch.get_num_threads() says, the calling thread
included, and no more than this process has processors.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonpool.base.native.build import BuildError, build
from moonpool.engine.kernels.native.structures import (
    Attention,
    GoOn,
    Int8Panels,
    Model,
    NativeProgress,
    NativeStep,
    PackedMatrix,
    Panels,
    Sampling,
    sampling_row,
)

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
#: Longest head: rows of one token are held on the stack.
MAX_HEAD_DIM = 256

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_pointer = ctypes.POINTER
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "mp_decode": (_pointer(Attention), _I),
    "mp_prefill": (_pointer(Attention), _I),
    "mp_rms_norm": (_I, _P, _L, _P, _P, _F, _P, _L, _L, _I),
    "mp_rope": (_I, _P, _L, _P, _P, _P, _L, _L, _I, _I, _I),
    "mp_silu_mul": (_I, _P, _L, _P, _L, _L, _I),
    "mp_write_kv": (_P, _L, _P, _L, _P, _L, _P, _P, _L, _I, _L, _L, _I),
    "mp_write_quantized": (_I, _P, _L, _P, _L, _I, _P, _L, _L, _P, _L, _L, _P, _P, _L, _I, _I, _I),
    "mp_outside": (_P, _L, _L, _L),
    "mp_copy_blocks": (_P, _L, _L, _L, _L, _P, _P, _L, _I),
    "mp_arrange": (_pointer(Panels), _P, _I),
    "mp_arrange_packed": (_pointer(Panels), _pointer(PackedMatrix), _I),
    "mp_rows": (_pointer(Panels), _P, _L, _P, _I),
    "mp_product": (_pointer(Panels), _P, _L, _L, _P, _I, _I),
    "mp_int8_panels": (_pointer(Panels), _pointer(Int8Panels), _I),
    "mp_highest": (_pointer(Panels), _pointer(Int8Panels), _P, _L, _P, _I),
    "mp_sample": (_pointer(Sampling), _I),
    "mp_uniform": (_P, _P, _L, _L, _P),
    "mp_follow": (_pointer(NativeProgress), _L),
    "mp_over": (_pointer(NativeProgress),),
    "mp_lend": (_P, _I, _I),
    "mp_aside": (_I,),
    "mp_others_compute": (),
    "mp_threads_used": (_I,),
    "mp_read": (_P, _L, _I),
    "mp_exp": (_P, _L, _L, _I, _I),
}

_WIDE: dict[str, tuple[Any, ...]] = {
    "mp_panels_bytes": (_pointer(Panels),),
    "mp_int8_panels_bytes": (_pointer(Panels),),
    "mp_step": (_pointer(Model), _pointer(NativeStep)),
    "mp_go_on": (_pointer(GoOn),),
}
"""Those that return a wide integer."""


class Seen(NamedTuple):
    """What rows attend to beside all earlier tokens, as in pool.h.

    Attributes:
        window: tokens that a row sees, the row's own included; 0 = all.
        chunked: whether the window begins anew every `window` tokens.
        sinks: [heads] float32, a further score of each head, which has no value.
    """

    window: int = 0
    chunked: bool = False
    sinks: Tensor | None = None


ALL = Seen()


class Library:
    """One built library. The kernels hold no state but memory that is kept from call to call, per thread.

    Attributes:
        sampling_options: names of `SamplingParams` that a `sampling_row` row has as float32.
        sampling_row: layout for one row's sampling.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._c = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._c, name)
            function.argtypes, function.restype = arguments, _I
        for name, wide in _WIDE.items():
            function = getattr(self._c, name)
            function.argtypes, function.restype = wide, _L
        self._c.mp_had.argtypes, self._c.mp_had.restype = (), ctypes.c_double
        self._c.mp_sampling_options.argtypes, self._c.mp_sampling_options.restype = (), ctypes.c_char_p
        self.sampling_options: tuple[str, ...] = tuple(self._c.mp_sampling_options().decode().split())
        self.sampling_row = sampling_row(self.sampling_options)
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
        seen: Seen = ALL,
    ) -> None:
        """Attend with one query row per item; see `moonpool.engine.kernels.reference.decode_attention`."""
        self._attention("mp_decode", q, kv, scales, block_tables, items, scale, out, seen)

    def prefill_attention(
        self,
        q: Tensor,
        kv: Tensor,
        scales: Tensor | None,
        block_tables: Tensor,
        items: Tensor,  # [n, 4] int32: first query row, rows, row of the tables, context
        scale: float,
        out: Tensor,
        seen: Seen = ALL,
    ) -> None:
        """Attend with the newest rows of each item; see `moonpool.engine.kernels.reference.prefill_attention`."""
        self._attention("mp_prefill", q, kv, scales, block_tables, items, scale, out, seen)

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
        seen: Seen,
    ) -> None:
        call = Attention(
            q.data_ptr(), q.stride(0), TYPES[q.dtype],
            kv.data_ptr(), kv.stride(0) * kv.element_size(), kv.stride(2) * kv.element_size(), TYPES[kv.dtype],
            *((None, 0, 0) if scales is None else (scales.data_ptr(), scales.stride(0), scales.stride(2))),
            block_tables.data_ptr(), block_tables.stride(0),
            items.data_ptr(), items.shape[0], q.shape[1], kv.shape[1], kv.shape[4], kv.shape[3],
            scale,
            out.data_ptr(), out.stride(0),
            seen.window, seen.chunked, None if seen.sinks is None else seen.sinks.data_ptr(),
        )  # fmt: skip
        self._done(getattr(self._c, name)(call, torch.get_num_threads()))

    def write_kv(
        self, k: Tensor, v: Tensor, kv: Tensor, scales: Tensor | None, block_ids: Tensor, offsets: Tensor
    ) -> None:
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
            TYPES[kv.dtype], kv.data_ptr(), kv.stride(0), kv.stride(2),
            scales.data_ptr(), scales.stride(0), scales.stride(2), *where, heads, size, threads,
        )  # fmt: skip

    def outside(self, index: Tensor, least: int, limit: int) -> bool:
        """Return whether any of `index` (int64, contiguous) is not in [least, limit)."""
        return bool(self._c.mp_outside(index.data_ptr(), index.numel(), least, limit))

    def copy_blocks(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        size = pool.element_size()
        block = pool[0, 0].numel() * size if pool.numel() else 0
        self._c.mp_copy_blocks(
            pool.data_ptr(), pool.stride(0) * size, pool.shape[0], pool.stride(1) * size, block,
            source.data_ptr(), target.data_ptr(), source.shape[0], torch.get_num_threads(),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        self._c.mp_rms_norm(
            TYPES[x.dtype], x.data_ptr(), x.stride(0), None if residual is None else residual.data_ptr(),
            weight.data_ptr(), eps, out.data_ptr(), x.shape[0], x.shape[1], torch.get_num_threads(),
        )  # fmt: skip

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        self._c.mp_rope(
            TYPES[x.dtype], x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(), out.stride(0), *x.shape, torch.get_num_threads(),
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        self._c.mp_silu_mul(
            TYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), *out.shape,
            torch.get_num_threads(),
        )  # fmt: skip

    def panels_bytes(self, panels: Panels) -> int:
        """Return the bytes that a matrix takes arranged, or 0 if the matrix cannot be arranged."""
        return int(self._c.mp_panels_bytes(panels))

    def arrange(self, panels: Panels, weight: Tensor) -> None:
        """Write `weight` [outputs, inputs], contiguous, to where `panels` says, arranged for products."""
        self._done(self._c.mp_arrange(panels, weight.data_ptr(), torch.get_num_threads()))

    def arrange_packed(self, panels: Panels, weight: PackedMatrix) -> None:
        """Write a packed weight to the memory in `panels`, arranged for products."""
        self._c.mp_arrange_packed(panels, weight, torch.get_num_threads())

    def rows(self, panels: Panels, index: Tensor, out: Tensor) -> None:
        """Write the rows `index` (int64, contiguous, checked) of an arranged matrix to `out`, dequantised if packed."""
        self._c.mp_rows(panels, index.data_ptr(), index.numel(), out.data_ptr(), torch.get_num_threads())

    def product(self, panels: Panels, x: Tensor, out: Tensor, end: int) -> None:
        """Write x [M, inputs], rows dense, times an arranged matrix to `out`, contiguous; `end` as in panels.h."""
        self._done(
            self._c.mp_product(
                panels, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), end, torch.get_num_threads()
            )
        )

    def int8_panels_bytes(self, panels: Panels) -> int:
        """Return the bytes that a matrix takes as bytes, or 0 without an int8 copy."""
        return int(self._c.mp_int8_panels_bytes(panels))

    def make_int8(self, panels: Panels, copy: Int8Panels) -> bool:
        """Write an arranged matrix as bytes, see int8_panels.cpp; return whether all weights are finite."""
        return not self._c.mp_int8_panels(panels, copy, torch.get_num_threads())

    def highest(self, panels: Panels, copy: Int8Panels, x: Tensor, tokens: Tensor) -> bool:
        """Write the highest output for each row in x [M, inputs] to `tokens` [M] int32; False: see int8_panels.h."""
        code = int(
            self._c.mp_highest(panels, copy, x.data_ptr(), x.shape[0], tokens.data_ptr(), torch.get_num_threads())
        )
        self._done(code < 0)
        return not code

    def step(self, model: Model, step: NativeStep) -> int:
        """Run layers, see step.cpp; return the layer that was reached."""
        came = int(self._c.mp_step(model, step))
        self._done(came < 0)
        return came

    def follow(self, progress: NativeProgress, layer: int) -> bool:
        """Wait for a layer, counted in the whole model, and return whether the layer was computed; see progress.cpp."""
        return bool(self._c.mp_follow(progress, layer))

    def over(self, progress: NativeProgress) -> None:
        """Tell the following thread that no further layer is computed."""
        self._c.mp_over(progress)

    def go_on(self, further: GoOn) -> int:
        """Compute further steps of a run, see go_on.cpp; return how many are done."""
        done = int(self._c.mp_go_on(further))
        self._done(done < 0)
        return done

    def sample(self, sampling: Sampling) -> int:
        """Choose tokens, see sample.cpp; return how many rows failed."""
        failed = int(self._c.mp_sample(sampling, torch.get_num_threads()))
        self._done(failed < 0)
        return failed

    def uniform(self, seeds: int, positions: int, later: int, count: int, numbers: int) -> None:
        """Write the number that each seed and position is drawn by, see draws.cpp; `later` is added to positions.

        The others, but `count`, are addresses.
        """
        self._c.mp_uniform(seeds, positions, later, count, numbers)

    def read(self, memory: Tensor) -> None:
        """Read a large tensor once, as fast as possible: a benchmark's ceiling."""
        self._c.mp_read(memory.data_ptr(), memory.nbytes, torch.get_num_threads())

    def exponentials(self, numbers: Tensor, times: int) -> None:
        """Replace each row of `numbers` [threads, n] float32 by exponentials, `times` times: a benchmark's ceiling."""
        self._c.mp_exp(numbers.data_ptr(), numbers.shape[1], times, 0, numbers.shape[0])

    def lend(self, page: int, count: int, own: int) -> None:
        """From now on use as many threads as the page at this address allows, with `count` slots, `own` being ours.

        See `moonpool.engine.cpu_sharing`. The page stays mapped as long as the process runs.
        """
        self._c.mp_lend(page, count, own)

    def had(self) -> float:
        """Return the mean share of the wanted cores that this process had since the last call.

        1 where `lend` was not called.
        """
        return float(self._c.mp_had())

    def others_compute(self) -> bool:
        """Return whether another process that shares our cores computes; False where `lend` was not called."""
        return bool(self._c.mp_others_compute())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave one core to the calling thread, which computes something else, as long as the body runs."""
        self._c.mp_aside(1)
        try:
            yield
        finally:
            self._c.mp_aside(-1)

    def threads_used(self, threads: int) -> int:
        """Return how many of `threads` threads work on one job at the same time, for tests."""
        return int(self._c.mp_threads_used(threads))

    @staticmethod
    def _done(code: int) -> None:
        if code:
            raise MemoryError("a native kernel found no memory to work in")


class Loader:
    """Builds and loads a library at first use, once, and logs the reason if not available.

    Attributes:
        loaded: the library, None before the first use or if not available.
        failure: why not available; "" as long as that was not seen.
    """

    def __init__(self, build: Callable[[], Path] = build) -> None:
        self._build = build
        self._lock = threading.Lock()
        self.loaded: Library | None = None
        self.failure = ""

    def get(self) -> Library | None:
        """Return the library, or None if not available."""
        if self.loaded is None and not self.failure:
            with self._lock:
                if self.loaded is None and not self.failure:
                    self._load()
        return self.loaded

    def _load(self) -> None:
        try:
            self.loaded = Library(self._build())
        except (BuildError, OSError, AttributeError) as error:
            self.failure = str(error)
            log.warning("native kernels cannot be had, plain torch runs instead: %s", self.failure)


loader = Loader()
"""This process's."""


def get() -> Library | None:
    """Return this machine's library, built if need be, or None if not available."""
    return loader.get()


def loaded() -> Library | None:
    """Return the library if loaded already."""
    return loader.loaded


def failure() -> str:
    """Return why `get` gave None; empty if it did not."""
    return loader.failure
