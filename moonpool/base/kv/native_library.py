"""The native KV library (`kernels/kv`, built like the kernels of engines), and long prompts' keys made there.

Native code makes and checks keys without the interpreter's lock, so a thread that reads a long prompt does not stop the
process's other threads. If the library cannot be built, Python does the same and holds the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
from collections.abc import Sequence
from pathlib import Path

from moonpool.base.kv.keys import KEY_BYTES, BlockKey, block_keys, tokens_from_bytes
from moonpool.base.kv.media import MediaItem
from moonpool.base.native.build import ARCHITECTURES, FOLDER, BuildError, Report, build, unheard

SOURCES = FOLDER / "kv"


def library(report: Report = unheard) -> Path:
    """Blocking. Where the library lies, built if need be; `report` is told how that goes.

    Raises:
        BuildError: the library cannot be had.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise BuildError(f"none for this processor ({platform.machine()})")
    return build(
        architecture.targets[-1], SOURCES, report
    )  # the plainest: the C library and xxhash look at the processor


log = logging.getLogger(__name__)
_TOKEN_BYTES = 4


def chain_keys(parent: bytes, data: bytes, block_size: int, media: Sequence[MediaItem] = ()) -> list[BlockKey]:
    """As `block_keys`, of tokens as little-endian int32."""
    if media:
        return block_keys(parent, tokens_from_bytes(data), block_size, media)
    native = prepare()
    keys = None if native is None else _native_chain(native, parent, data, block_size)
    return block_keys(parent, tokens_from_bytes(data), block_size) if keys is None else keys


def tokens_below(data: bytes, vocab_size: int) -> bool:
    """Whether tokens, as little-endian int32, are all in [0, vocab_size)."""
    native = prepare()
    if native is not None:
        return bool(native.mp_tokens(data, len(data) // _TOKEN_BYTES, vocab_size))
    tokens = tokens_from_bytes(data)
    return not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size


def build_ahead(report: Report) -> None:
    """Blocking: builds the library if need be and if possible; `report` is told how that goes."""
    with contextlib.suppress(BuildError):  # the first use reports this
        library(report)


@functools.cache
def prepare() -> ctypes.CDLL | None:
    """Blocking: this process's library, built if need be; None if not available."""
    try:
        return load_native_keys(library())
    except (BuildError, OSError, AttributeError) as error:
        log.warning("keys are made with the interpreter's lock held, native code cannot be had: %s", error)
        return None


def load_native_keys(path: Path) -> ctypes.CDLL:
    """The functions of a built library.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: a function is missing.
        BuildError: the library computes wrong values.
    """
    native = ctypes.CDLL(str(path))
    native.mp_chain.argtypes = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p
    native.mp_tokens.argtypes = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint32
    data, parent = bytes(range(250)) * 16, bytes(range(KEY_BYTES))
    for block_size in (1, 8, 16, 64, 247):  # around those at which the hash goes another way
        if _native_chain(native, parent, data, block_size) != block_keys(parent, tokens_from_bytes(data), block_size):
            raise BuildError("it makes wrong keys")
    return native


def _native_chain(native: ctypes.CDLL, parent: bytes, data: bytes, block_size: int) -> list[BlockKey] | None:
    """None if blocks are too long for native code."""
    size = _TOKEN_BYTES * block_size
    memory = ctypes.create_string_buffer(parent, KEY_BYTES * (1 + len(data) // size))
    if not native.mp_chain(data, size, len(data) // size, memory):
        return None
    packed = memory.raw
    return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(KEY_BYTES, len(packed), KEY_BYTES)]
