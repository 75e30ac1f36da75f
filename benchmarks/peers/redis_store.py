"""Redis through redis-py with hiredis: one value per block, batches in one pipeline, nothing written to disk.

Values are sent out of the client's memory without a copy and, as redis-py can only hand out new bytes, copied once
into it. Settings are Redis' own but for persistence, which is off.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from benchmarks.frame import Skipped, optional
from benchmarks.kvstore_client import Memory
from benchmarks.peers.contract import Batches
from benchmarks.peers.programs import HOST, free_port, listening, program

NAME = "Redis"


@contextlib.contextmanager
def running(nbytes: int) -> Iterator[str]:
    """A server without a memory limit, so that nothing is evicted.

    Raises:
        Skipped: it, redis-py or hiredis is not installed.
    """
    _redis()
    port = free_port()
    argv = [program("redis-server"), "--bind", HOST, "--port", str(port), "--save", "", "--appendonly", "no"]
    with listening(argv, port, os.environ):
        yield f"{HOST}:{port}"


class _Client:
    def __init__(self, address: str, memory: Memory) -> None:
        host, _, port = address.rpartition(":")
        self._redis = _redis().Redis(host=host, port=int(port))
        self._memory = memory

    def put(self, batches: Batches, block_bytes: int) -> None:
        source = self._memory.source
        blocks = [source[at : at + block_bytes] for at in range(0, source.nbytes - block_bytes + 1, block_bytes)]
        for keys in batches:
            if len(keys) == 1:
                self._redis.set(keys[0], blocks[0])
                continue
            pipeline = self._redis.pipeline(transaction=False)
            for index, key in enumerate(keys):
                pipeline.set(key, blocks[index])
            pipeline.execute()

    def get(self, batches: Batches, block_bytes: int) -> None:
        target = self._memory.target
        for keys in batches:
            if len(keys) == 1:
                values = [self._redis.get(keys[0])]
            else:
                pipeline = self._redis.pipeline(transaction=False)
                for key in keys:
                    pipeline.get(key)
                values = pipeline.execute()
            for index, value in enumerate(values):
                if value is None:
                    raise RuntimeError("Redis does not have a block")
                target[index * block_bytes : (index + 1) * block_bytes] = value

    def clear(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()


def client(address: str, memory: Memory) -> _Client:
    """A client.

    Raises:
        Skipped: redis-py or hiredis is not installed.
    """
    return _Client(address, memory)


def _redis() -> Any:
    module = optional("redis")
    optional("hiredis")
    if not module.utils.HIREDIS_AVAILABLE:
        raise Skipped("redis-py does not use hiredis")
    return module
