"""The process in which a store's client is measured, and other projects' programs as child processes."""

import os
import socket
import sys

import pytest

from benchmarks.frame import Skipped
from benchmarks.kvstore_client import Memory
from benchmarks.peers.contract import Batches
from benchmarks.peers.driver import Driver, answer, batches
from benchmarks.peers.programs import free_port, listening, program

SIZE = 64 << 10
LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"


class Dictionary:
    """The simplest of all stores."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.blocks: dict[bytes, bytes] = {}

    def put(self, batches: Batches, block_bytes: int) -> None:
        for keys in batches:
            for place, key in enumerate(keys):
                self.blocks[key] = bytes(self.memory.source[place * block_bytes : (place + 1) * block_bytes])

    def get(self, batches: Batches, block_bytes: int) -> None:
        for keys in batches:
            for place, key in enumerate(keys):
                self.memory.target[place * block_bytes : (place + 1) * block_bytes] = self.blocks[key]

    def clear(self) -> None:
        self.blocks.clear()

    def close(self) -> None:
        self.clear()


@pytest.fixture
def memory() -> Memory:
    return Memory(4 * SIZE)


def test_commands_are_timed_and_checked(memory: Memory) -> None:
    client = Dictionary(memory)
    command = {"seed": "s", "block_bytes": SIZE, "batch": 2, "operations": 3}
    assert answer(client, memory, {"verb": "put", **command})["seconds"] >= 0
    assert len(client.blocks) == 6
    assert "error" in answer(client, memory, {"verb": "check", **command})
    assert answer(client, memory, {"verb": "get", **command})["seconds"] >= 0
    assert answer(client, memory, {"verb": "check", **command}) == {}
    assert not any(memory.target[: 2 * SIZE])  # so that the next check is of what comes next
    assert answer(client, memory, {"verb": "clear"}) == {}
    assert answer(client, memory, {"verb": "get", **command})["error"].startswith("KeyError")


def test_batches_are_the_same_for_all_stores() -> None:
    assert batches("s", 2, 3) == batches("s", 2, 3)
    assert [len(keys) for keys in batches("s", 2, 3)] == [3, 3]


def test_a_program_that_is_not_installed_is_skipped() -> None:
    with pytest.raises(Skipped, match="no-such-program is not installed"):
        program("no-such-program")


def test_a_program_is_there_while_the_body_runs() -> None:
    port = free_port()
    with listening([sys.executable, "-c", LISTEN, str(port)], port, os.environ):
        socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)


def test_a_program_that_ends_is_an_error_with_its_output() -> None:
    argv = [sys.executable, "-c", "raise SystemExit('out of cheese')"]
    with pytest.raises(RuntimeError, match="out of cheese"), listening(argv, free_port(), os.environ):
        raise AssertionError("it does not listen")


def test_our_store_is_measured_in_the_driver() -> None:
    from benchmarks.peers import moonpool_store

    with moonpool_store.GRPC.running(64 << 20) as address, Driver("moonpool-grpc", address) as driver:
        command: dict[str, object] = {"seed": "s", "block_bytes": SIZE, "batch": 2, "operations": 2}
        assert driver.do("put", **command) > 0
        assert driver.do("get", **command) > 0
        driver.do("check", block_bytes=SIZE, batch=2)
        with pytest.raises(RuntimeError, match="of 2 blocks"):
            driver.do("get", **command | {"seed": "never put"})
