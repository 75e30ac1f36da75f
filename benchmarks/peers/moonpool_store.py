"""Moonpool's kvstore for the comparison, by transport: the DRAM tier alone, through the blocking client `KVClient`.

Values are put out of memory that the client shares with the store, as Mooncake's are out of registered memory, and read
into the memory that all clients have.
"""

import contextlib
from collections.abc import Iterator, Sequence

from benchmarks.kvstore_client import Memory
from benchmarks.peers.contract import Batches
from benchmarks.processes import child
from moonpool.base.rpc.tuning import tune_grpc
from moonpool.client.kv import KVClient

TIMEOUT_S = 300.0


class _Client:
    def __init__(self, address: str, memory: Memory, transport: str) -> None:
        self._client = KVClient(
            address, namespace="benchmark", transports=transport, memory_bytes=memory.source.nbytes, timeout_s=TIMEOUT_S
        )
        self._client.memory[:] = memory.source
        self._target = memory.target

    def put(self, batches: Batches, block_bytes: int) -> None:
        client, source = self._client, self._client.memory
        for keys in batches:
            if len(keys) == 1:
                stored: int = client.put(keys[0], source[:block_bytes])
            else:
                stored = client.batch_put(_parts(keys, source, block_bytes))
            if stored != len(keys):
                raise RuntimeError(f"the store took {stored} of {len(keys)} blocks")

    def get(self, batches: Batches, block_bytes: int) -> None:
        client, target = self._client, self._target
        for keys in batches:
            if len(keys) == 1:
                found = [client.get_into(keys[0], target[:block_bytes])]
            else:
                found = client.batch_get_into(_parts(keys, target, block_bytes))
            if found != [block_bytes] * len(keys):
                raise RuntimeError(f"the store does not have all of {len(keys)} blocks")

    def clear(self) -> None:
        """Nothing: blocks leave by eviction alone."""

    def close(self) -> None:
        self._client.close()


def _parts(keys: Sequence[bytes], memory: memoryview, nbytes: int) -> dict[bytes, memoryview]:
    """Memory of each block."""
    return {key: memory[index * nbytes : (index + 1) * nbytes] for index, key in enumerate(keys)}


class OnLane:
    """The store on one transport; a `Store` of contract.py."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.NAME = f"Moonpool over {transport}"

    @contextlib.contextmanager
    def running(self, nbytes: int) -> Iterator[str]:
        """A kvstore."""
        flags = ("--dram-bytes", str(nbytes), "--kv-transports", self.transport, "--log-level", "warning")
        with child("moonpool.kvstore", *flags) as store:
            yield store.address

    def client(self, address: str, memory: Memory) -> _Client:
        """A client."""
        tune_grpc()
        return _Client(address, memory, self.transport)


LOCAL, TCP, GRPC = OnLane("local"), OnLane("tcp"), OnLane("grpc")
