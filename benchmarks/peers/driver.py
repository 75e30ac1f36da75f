"""The process in which one store's client is measured: `python -m benchmarks.peers.driver --store NAME --address A`.

All clients run in the same kind of process: the same memory, allocator settings and loop. It prints its own address and
answers each line of JSON on the one connection made to it with a line of JSON.
"""

import argparse
import importlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from benchmarks.kvstore_client import Memory, chain
from benchmarks.peers.contract import BlockClient, Store
from benchmarks.processes import Child
from moonpool.base.rpc.tuning import tune_gc, tune_malloc

MODULES = {
    "moonpool": "benchmarks.peers.moonpool_store:LOCAL",
    "moonpool-tcp": "benchmarks.peers.moonpool_store:TCP",
    "moonpool-grpc": "benchmarks.peers.moonpool_store:GRPC",
    "mooncake": "benchmarks.peers.mooncake_store",
    "redis": "benchmarks.peers.redis_store",
    "grpc": "benchmarks.peers.bare_grpc",
}
"""Modules with what contract.py says, or "module:name" of something that has it."""
MEMORY_BYTES = 64 << 20


def store_of(name: str) -> Store:
    """A store by its name among `MODULES`."""
    module, _, attribute = MODULES[name].partition(":")
    found: Any = importlib.import_module(module)
    store: Store = getattr(found, attribute) if attribute else found
    return store


def batches(seed: object, operations: int, batch: int) -> list[list[bytes]]:
    """Keys of each of the operations."""
    keys = chain(seed, operations * batch)
    return [keys[at : at + batch] for at in range(0, len(keys), batch)]


def answer(client: BlockClient, memory: Memory, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command; an error is returned as an answer."""
    try:
        verb = command["verb"]
        if verb == "clear":
            client.clear()
            return {}
        size, batch = command["block_bytes"], command["batch"]
        if verb == "check":
            wrong = memory.differs(batch, size)
            memory.target[: batch * size] = bytes(batch * size)
            return {"error": f"{wrong} of {batch} blocks differ from those put"} if wrong else {}
        keys = batches(command["seed"], command["operations"], batch)
        begin = time.perf_counter()
        (client.put if verb == "put" else client.get)(keys, size)
        return {"seconds": time.perf_counter() - begin}
    except Exception as error:  # an error of a peer ends its figure, not the benchmark
        return {"error": f"{type(error).__name__}: {error}"}


class Driver:
    """The near end: a driver process, and commands to it."""

    def __init__(self, store: str, address: str) -> None:
        self._child = Child("benchmarks.peers.driver", "--store", store, "--address", address)
        host, _, port = self._child.address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)))
        self._file = self._connection.makefile("rw", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._connection.close()
        self._child.stop()

    def do(self, verb: str, **arguments: object) -> float:
        """Do one command; return its seconds, 0 where none were taken.

        Raises:
            RuntimeError: it failed.
        """
        self._file.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._file.flush()
        line = self._file.readline()
        result = json.loads(line) if line else {"error": "the measuring process has ended"}
        if "error" in result:
            raise RuntimeError(result["error"])
        return float(result.get("seconds", 0.0))


def _lines(listener: socket.socket) -> Iterator[tuple[str, Any]]:
    connection, _ = listener.accept()
    with connection, connection.makefile("rw", encoding="utf-8") as file:
        for line in file:
            yield line, file


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=[*MODULES], required=True, help="the store whose client is measured")
    parser.add_argument("--address", required=True, help="where the store is")
    options = parser.parse_args(argv)
    tune_malloc()
    tune_gc()
    memory = Memory(MEMORY_BYTES)
    client: BlockClient = store_of(options.store).client(options.address, memory)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready: 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        for line, file in _lines(listener):
            file.write(json.dumps(answer(client, memory, json.loads(line))) + "\n")
            file.flush()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
