"""Copies slices that arrive to their destination and verifies them there, in one pass over the bytes.

Native code does the work (`kernels/kv/landing.cpp`) with the xxhash package's own functions; in a thread the copy runs
without the interpreter's lock. Without native code, memoryviews and xxhash do the same in two passes.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moonpool.base.kv.iovec import BytesLike, Iovec, iovec_parts
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.native_library import library
from moonpool.base.native.build import BuildError

log = logging.getLogger(__name__)
CopyFunction = Callable[[list[memoryview], BytesLike, Sequence[int]], int]
"""Cuts bytes into pieces as long as the targets, copies each piece to a target; how many leading pieces match.

Takes (targets, bytes, hash of each piece). Hashes are made of the targets, after the copy: whatever changes the source
meanwhile is noticed. From the first piece with another hash on, the targets' bytes are undefined.

Raises:
    ValueError: targets, bytes and hashes do not fit each other.
    BufferError: a target cannot be written, or a view is not contiguous.
"""
DeferredCopy = Callable[[list[memoryview], BytesLike | None, Sequence[int]], Callable[[], int]]
"""As `CopyFunction`, raising the same errors, but copies and verifies when the result is called: once, in any thread.

All memory is held until then. Without bytes these lie in the targets already, and are only verified.
"""


def copy_in_two_passes(targets: list[memoryview], data: BytesLike, hashes: Sequence[int]) -> int:
    """Copy a piece, then hash the piece."""
    if len(targets) != len(hashes) or sum(target.nbytes for target in targets) != data.nbytes:
        raise _misfit(targets, data, hashes)
    at = 0
    for number, (target, expected) in enumerate(zip(targets, hashes, strict=True)):
        if target.readonly or not target.contiguous:
            raise BufferError("a target cannot be written, or is not contiguous")
        begin = at
        for part in iovec_parts(data[at : at + target.nbytes]):
            target[at - begin : at - begin + part.nbytes] = part
            at += part.nbytes
        if slice_hash(target) != expected:
            return number
    return len(hashes)


def count_verified(targets: list[memoryview], hashes: Sequence[int]) -> int:
    """How many leading targets have their hash."""
    for number, (target, expected) in enumerate(zip(targets, hashes, strict=True)):
        if slice_hash(target) != expected:
            return number
    return len(targets)


def defer_in_two_passes(targets: list[memoryview], data: BytesLike | None, hashes: Sequence[int]) -> Callable[[], int]:
    """See `DeferredCopy`."""
    return (
        partial(count_verified, targets, hashes) if data is None else partial(copy_in_two_passes, targets, data, hashes)
    )


class CopyFunctions(NamedTuple):
    """One way to copy, at once and later."""

    land: CopyFunction
    later: DeferredCopy


IN_TWO_PASSES = CopyFunctions(copy_in_two_passes, defer_in_two_passes)


def _misfit(targets: list[memoryview], data: BytesLike | None, hashes: Sequence[int]) -> ValueError:
    have, sizes = "no" if data is None else data.nbytes, [target.nbytes for target in targets]
    return ValueError(f"{have} bytes, {len(hashes)} hashes, targets of {sizes} bytes")


class _Functions(ctypes.Structure):
    """struct Functions in landing.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "get_buffer",
            "release_buffer",
            "list_size",
            "list_item",
            "hash",
            "reset",
            "update",
            "digest",
            "create",
        )
    )


def load_native_copy(path: Path) -> CopyFunctions:
    """A built library's functions.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the library, or the xxhash package, lacks a function.
        BuildError: a function's result is wrong.
    """
    library, hashes = ctypes.PyDLL(str(path)), _hashes()
    given = _Functions(
        _address(ctypes.pythonapi.PyObject_GetBuffer),
        _address(ctypes.pythonapi.PyBuffer_Release),
        _address(ctypes.pythonapi.PyList_Size),
        _address(ctypes.pythonapi.PyList_GetItem),
        hash_address(),
        _address(hashes.XXH3_64bits_reset),
        _address(_hash_function(hashes, "XXH3_64bits_update")),
        _address(hashes.XXH3_64bits_digest),
        _address(hashes.XXH3_createState),
    )
    library.mp_init.argtypes, library.mp_init.restype = (ctypes.POINTER(_Functions),), None
    library.mp_init(given)
    native, begin, end = library.mp_land, library.mp_begin, library.mp_end
    native.argtypes, native.restype = (ctypes.py_object,) * 3, ctypes.c_int64
    begin.argtypes, begin.restype = native.argtypes, ctypes.c_void_p
    end.argtypes, end.restype = (ctypes.c_void_p,), None
    run = ctypes.CDLL(str(path)).mp_run  # without the interpreter's lock
    run.argtypes, run.restype = (ctypes.c_void_p,), ctypes.c_int64

    def land(targets: list[memoryview], data: BytesLike, hashes: Sequence[int]) -> int:
        found: int = native(targets, iovec_parts(data), array("Q", hashes))
        if found < 0:
            raise _misfit(targets, data, hashes)
        return found

    def later(targets: list[memoryview], data: BytesLike | None, hashes: Sequence[int]) -> Callable[[], int]:
        parts = ctypes.py_object() if data is None else iovec_parts(data)
        job: int | None = begin(targets, parts, array("Q", hashes))
        if job is None:
            raise _misfit(targets, data, hashes)
        return partial(_run, run, end, job)

    if not (_check_native(land) and _check_native(lambda *given: later(*given)())):
        raise BuildError("it copies or hashes wrongly")
    return CopyFunctions(land, later)


def _run(run: Callable[[int], int], end: Callable[[int], None], job: int) -> int:
    found = run(job)
    end(job)
    return found


def _hashes() -> ctypes.CDLL:
    return ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)


def hash_address() -> int | None:
    """Where the function lies that makes `slice_hash`: uint64_t (*)(const void* data, size_t nbytes)."""
    return _address(_hash_function(_hashes(), "XXH3_64bits"))


def _hash_function(library: ctypes.CDLL, name: str) -> object:
    """The function for the processor at hand, where the package chooses among several."""
    return getattr(library, f"{name}_dispatch", None) or getattr(library, name)


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]  # a foreign function


def _check_native(land: CopyFunction) -> bool:
    """Try sizes around those at which the code, or the hash, go another way."""
    source = memoryview(bytes(range(256)) * 600)
    memory = memoryview(bytearray(source.nbytes))
    sizes = (1, 16, 240, 4096, 32768, 32769, 80_000)
    ends = list(itertools.accumulate(sizes, initial=0))
    targets = [memory[begin:end] for begin, end in itertools.pairwise(ends)]
    data, values = source[: ends[-1]], [slice_hash(source[begin:end]) for begin, end in itertools.pairwise(ends)]
    scattered = Iovec([data[:100], data[100:40_000], data[40_000:]])

    def comes(given: BytesLike) -> bool:
        memory[:] = bytes(memory.nbytes)
        return land(targets, given, values) == len(sizes) and memory[: ends[-1]] == data

    def stops(number: int) -> bool:
        return land(targets, data, [value ^ (at == number) for at, value in enumerate(values)]) == number

    return comes(data) and comes(scattered) and all(map(stops, range(len(sizes))))


class SliceCopier:
    """Copies and hashes slices: in one pass by native code, or in two passes. Chosen at first use or by `prepare`.

    Args:
        library: finds or builds the native library; raises `BuildError` if there is none.
    """

    def __init__(self, library: Callable[[], Path]) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._ways: CopyFunctions | None = None

    def __call__(self, targets: list[memoryview], data: BytesLike, hashes: Sequence[int]) -> int:
        return (self._ways or self.prepare()).land(targets, data, hashes)

    def later(self, targets: list[memoryview], data: BytesLike | None, hashes: Sequence[int]) -> Callable[[], int]:
        return (self._ways or self.prepare()).later(targets, data, hashes)

    def prepare(self) -> CopyFunctions:
        """Blocking: builds the library if need be, and loads the library."""
        with self._lock:
            if self._ways is None:
                self._ways = self._choose()
            return self._ways

    def _choose(self) -> CopyFunctions:
        try:
            native = load_native_copy(self._library())
        except (BuildError, OSError, AttributeError, ImportError) as error:
            log.warning("slices are copied and hashed in two passes, native code cannot be had: %s", error)
            return IN_TWO_PASSES
        log.info("slices are copied and hashed in one native pass")
        return native


copy_verified = SliceCopier(library)
"""This process's."""
