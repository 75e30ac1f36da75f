"""Mooncake Store over TCP: a master, a process that lends its memory, and a client that lends none.

So every block crosses from one process to the other, as with ours. Blocks go out of and into registered memory, with
Mooncake's calls for one block and for many. Connections are kept (`MC_TCP_ENABLE_CONNECTION_POOL`), and the shortcut
for blocks in a client's own memory is off, as it has none. Else its own settings.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.frame import Skipped, optional
from benchmarks.kvstore_client import Memory
from benchmarks.peers.contract import Batches
from benchmarks.peers.programs import HOST, free_port, listening, program

NAME = "Mooncake Store"
SETTINGS = {"MC_TCP_ENABLE_CONNECTION_POOL": "true", "MC_STORE_MEMCPY": "0"}
QUIET = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "MC_YLT_LOG_LEVEL": "error"}
METADATA = "P2PHANDSHAKE"
_BUFFER_BYTES = 16 << 20  # of the client's own, which registered memory makes needless


def _store_class() -> Any:
    """Mooncake's client.

    Raises:
        Skipped: it, or a library that it needs, is not installed.
    """
    os.environ.update(SETTINGS | QUIET)
    try:
        return optional("mooncake.store").MooncakeDistributedStore
    except ImportError as error:  # its shared objects want libibverbs even where there is only TCP
        raise Skipped(f"Mooncake Store cannot be loaded: {error}") from error


@contextlib.contextmanager
def running(nbytes: int) -> Iterator[str]:
    """A master and a process with `nbytes` for blocks.

    Raises:
        Skipped: it is not installed.
    """
    _store_class()
    environment = os.environ | SETTINGS
    master, metrics, holder = free_port(), free_port(), free_port()
    master_argv = [
        *(program("mooncake_master"), f"--rpc_address={HOST}", f"--rpc_port={master}"),
        *(f"--metrics_host={HOST}", f"--metrics_port={metrics}"),
    ]
    holder_argv = [
        *(program("mooncake_client"), f"--host={HOST}", f"--port={holder}", "--protocol=tcp"),
        *(f"--master_server_address={HOST}:{master}", f"--metadata_server={METADATA}"),
        f"--global_segment_size={nbytes >> 20}MB",
    ]
    with listening(master_argv, master, environment), listening(holder_argv, holder, environment):
        yield f"{HOST}:{master}"


class _Client:
    def __init__(self, address: str, memory: Memory) -> None:
        self._store = _store_class()()
        if self._store.setup(HOST, METADATA, 0, _BUFFER_BYTES, "tcp", "", address):
            raise RuntimeError("Mooncake's client cannot be set up")
        self._source, self._target = self._register(memory.source), self._register(memory.target)

    def _register(self, memory: memoryview) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._store.register_buffer(address, memory.nbytes):
            raise RuntimeError("Mooncake does not register memory")
        return address

    def put(self, batches: Batches, block_bytes: int) -> None:
        store, source = self._store, self._source
        for keys in batches:
            if len(keys) == 1:
                results: Sequence[int] = [store.put_from(keys[0].hex(), source, block_bytes)]
            else:
                pointers, sizes = self._places(source, len(keys), block_bytes)
                results = store.batch_put_from([key.hex() for key in keys], pointers, sizes)
            if any(results):
                raise RuntimeError(f"Mooncake did not store a block: {list(results)}")

    def get(self, batches: Batches, block_bytes: int) -> None:
        store, target = self._store, self._target
        for keys in batches:
            if len(keys) == 1:
                results: Sequence[int] = [store.get_into(keys[0].hex(), target, block_bytes)]
            else:
                pointers, sizes = self._places(target, len(keys), block_bytes)
                results = store.batch_get_into([key.hex() for key in keys], pointers, sizes)
            if any(result != block_bytes for result in results):
                raise RuntimeError(f"Mooncake did not read a block: {list(results)}")

    @staticmethod
    def _places(base: int, count: int, block_bytes: int) -> tuple[list[int], list[int]]:
        return [base + index * block_bytes for index in range(count)], [block_bytes] * count

    def clear(self) -> None:
        self._store.remove_all(True)

    def close(self) -> None:
        self._store.close()


def client(address: str, memory: Memory) -> _Client:
    """A client.

    Raises:
        Skipped: it is not installed.
    """
    return _Client(address, memory)
