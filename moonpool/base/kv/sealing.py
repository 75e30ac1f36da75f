"""Hashes slices that were computed in this process, a batch in one call.

Native code does the work (`kernels/kv/sealing.cpp`) on several threads, with the xxhash package's own function and
without the interpreter's lock. If the library cannot be built, xxhash does the same slice by slice.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Callable
from pathlib import Path

from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.native_copy import hash_address
from moonpool.base.kv.native_library import library
from moonpool.base.native.build import BuildError

log = logging.getLogger(__name__)
_SEAL_NUMBERS = 3
_THREAD_BYTES = 1 << 20
"""Bytes that are worth another thread: a thread starts in the time that hashing 0.1 MiB takes."""

SealFunction = Callable[["array[int]", int, int], None]
"""Makes hashes. Takes (seals, their bytes, most threads).

Seals are three numbers each: the address of a slice, the slice's bytes, and the address of the slice's hash, 8 bytes.
"""


def seal_in_python(seals: array[int], nbytes: int, threads: int) -> None:
    """See `SealFunction`; on one thread, which holds the interpreter's lock for small slices."""
    del nbytes, threads
    for at in range(0, len(seals), _SEAL_NUMBERS):
        data, size, target = seals[at : at + _SEAL_NUMBERS]
        value = slice_hash(memoryview((ctypes.c_char * size).from_address(data)))
        ctypes.c_uint64.from_address(target).value = value


@functools.cache
def prepare() -> SealFunction:
    """Blocking: this process's function; builds the library if need be."""
    try:
        return load_native_seals(library())
    except (BuildError, OSError, AttributeError, ImportError) as error:
        log.warning("slices are hashed one by one, native code cannot be had: %s", error)
        return seal_in_python


def load_native_seals(path: Path) -> SealFunction:
    """Return a built library's function.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the library, or the xxhash package, lacks a function.
        BuildError: the function's result is wrong.
    """
    native, hash_function = ctypes.CDLL(str(path)).mp_seal, hash_address()
    native.argtypes, native.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None

    def seal(seals: array[int], nbytes: int, threads: int) -> None:
        native(
            hash_function,
            seals.buffer_info()[0],
            len(seals) // _SEAL_NUMBERS,
            min(threads, 1 + nbytes // _THREAD_BYTES),
        )

    if not _is_right(seal):
        raise BuildError("it hashes wrongly")
    return seal


def _is_right(seal: SealFunction) -> bool:
    """Try sizes at which the hash goes another way, on one thread and on several."""
    sizes = (0, 1, 16, 240, 4096, 32_769) * 3
    memory, found = ctypes.create_string_buffer(bytes(range(256)) * 130), (ctypes.c_uint64 * len(sizes))()
    data, hashes = ctypes.addressof(memory), ctypes.addressof(found)
    seals = array("Q")
    for number, size in enumerate(sizes):
        seals.extend((data, size, hashes + 8 * number))
    wanted = [slice_hash(memoryview(memory)[:size]) for size in sizes]
    for threads in (1, 3):
        found[:] = [0] * len(sizes)
        seal(seals, threads * _THREAD_BYTES, threads)
        if list(found) != wanted:
            return False
    return True
