"""Process and connection settings: large messages are cheap, and many files may be open.

The former settings were found by measuring (`python -m benchmarks.kv_stream`). Only speed depends on these settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import sys
from typing import Any

from moonpool.base import world
from moonpool.base.malloc import REST_S, FreedMemory, release_memory
from moonpool.base.rpc.messages import MESSAGE_BYTES

GRPC_EXPERIMENTS = "GRPC_EXPERIMENTS"
_EXPERIMENTS = (
    # The thread that polls for completions reads: with the event engine each arriving piece wakes a separate thread,
    # which costs more than reading.
    "-event_engine_client",
    "-event_engine_listener",
    # A read waits for the whole message rather than for the first bytes.
    "tcp_frame_size_tuning",
    "tcp_rcv_lowat",
)

LARGE_MESSAGE_OPTIONS: list[tuple[str, Any]] = [
    # A frame with about 1 MiB is one HTTP/2 frame, not 64; and the frame may be on the way before any request for it.
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # The frame arrives in few pieces: gRPC puts the pieces together at some cost for each.
    ("grpc.experimental.tcp_min_read_chunk_size", 64 << 10),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
]
"""gRPC options without which large messages are slow."""

CONNECTION_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Both sides ping an idle connection: a peer that vanished without closing the connection is noticed within 40 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    *LARGE_MESSAGE_OPTIONS,
]
"""gRPC options that channels and servers share."""

SWITCH_S = 0.0005
"""Longest time for which a thread that reads a request keeps the interpreter from the event loop."""
_MOST_FILES = (1 << 31) - 1
GC_OBJECTS = 4_000
"""Number of new objects after which the collector looks at young objects."""
GC_YOUNG_LOOKS, GC_MIDDLE_LOOKS = 1, 900
"""Looks at young objects before one at those that stayed, and such looks before one at all objects.

Each look holds the interpreter lock, so that it holds the event loop. Beside bodies of 2,000 tools, which a thread
reads, one at objects that stayed took up to 33 ms with 20,000, 2 and 150, and all looks 0.58 s of 3.7; now up to 3 ms,
and 0.25 s of 3.4 (processor time). Where no such bodies come there are hardly any looks, now as before.
"""


def tune_grpc() -> None:
    """Choose gRPC's ways of reading, unless the environment has chosen. To be called before gRPC is first used."""
    os.environ.setdefault(GRPC_EXPERIMENTS, ",".join(_EXPERIMENTS))
    quiet_grpc()


def quiet_grpc() -> None:
    """Have gRPC log errors alone, unless the environment wants more. To be called before gRPC is first used.

    Else each server that ends causes a line at every client.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def tune_gc() -> None:
    """Make the garbage collector look less often, and never at imported objects. To be called after the imports.

    Frames and messages are freed by their reference counts; with the default thresholds the collector still took 6 %
    of a sender's time.
    """
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, GC_YOUNG_LOOKS, GC_MIDDLE_LOOKS)


def tune_threads() -> None:
    """Make threads that compute for requests give way to the event loop soon.

    Python lets a thread keep the interpreter for 5 ms, and the loop asks for it after each wait for messages.
    """
    sys.setswitchinterval(SWITCH_S)


def tune_malloc() -> bool:
    """Keep glibc from returning every freed large buffer to the kernel; returns whether that was done (glibc only).

    A process at rest gives them back (`hand_freed_memory_back`).
    Without this setting each frame of about 1 MiB causes page faults again (0.57 against 1.7-3.1 GB/s through gRPC).
    """
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # present in glibc only
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    if not mallopt(mmap_threshold, 1 << 30):
        mallopt(mmap_threshold, 32 << 20)  # the most that older versions take
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)
    mallopt(arena_max, 4)  # each keeps the largest messages it ever held, and there may be eight per core
    return True


async def hand_freed_memory_back() -> None:
    """Hand freed memory back whenever the process is at rest, until cancelled."""
    use = world.CURRENT.get().usage
    freed = FreedMemory(use.processor_s(), use.resident_bytes())
    while True:
        await asyncio.sleep(REST_S)
        if freed.is_due(use.processor_s(), use.resident_bytes()):
            gc.collect()  # requests that were refused leave cycles, of errors and their frames, with all texts
            await asyncio.to_thread(release_memory)
            freed.handed_back(use.resident_bytes())


def open_files_limit() -> int:
    """Return how many files this process may have open, at most 2**31 - 1."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES)


def raise_open_files_limit() -> None:
    """Let this process have as many open files as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems do not permit what they name
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
