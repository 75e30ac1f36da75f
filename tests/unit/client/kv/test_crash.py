"""The blocking client while its store is killed and started again, and connections break: no wrong byte, no hang."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.base.transport.fault_injection import BREAK_CONNECTIONS, SEED
from moonpool.client.kv import KVClient, TransferFailed, Unavailable
from tests.unit.client.kv.test_values import NAME, data_of

SIZES = (1000, 65_536, 300_000, 1 << 20, 3 << 20)
ROUNDS = 4
SEED_OF_TEST = 11


@contextmanager
def store_at(port: int, transport: str, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A store as a process, whose transports break now and then; and its port."""
    flags = [
        "--listen",
        f"127.0.0.1:{port}",
        "--kv-transports",
        transport,
        "--set",
        f"kv_transports_dir={folder}",
        "--log-level",
        "error",
    ]
    environment = {"MOONPOOL_DIE_WITH_PARENT": "1", BREAK_CONNECTIONS: "0.01", SEED: str(SEED_OF_TEST)}
    child = subprocess.Popen(
        [sys.executable, "-m", "moonpool.kvstore", "--id", "kvstore-0", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert child.stdout is not None
        yield child, int(child.stdout.readline().rpartition(":")[2])
    finally:
        child.kill()
        child.communicate()


class Worker(threading.Thread):
    """Puts and gets values of many sizes until it is told to stop."""

    def __init__(self, client: KVClient, number: int, progress: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self._progress = progress
        self.stop = threading.Event()
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._client = client
        self._random = random.Random(SEED_OF_TEST + number)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    self._one()
                    self._progress.release()
                except (Unavailable, TransferFailed):
                    self.counts["lost"] += 1
        except BaseException as error:
            self.failure = error

    def _one(self) -> None:
        size, place = self._random.choice(SIZES), self._random.randrange(20)
        key, data = b"%d-%d" % (size, place), data_of(size, place + 1)
        if self._random.random() < 0.5:
            self.counts["put"] += self._client.put(key, data)
        buffer = bytearray(size)
        if self._random.random() < 0.5:
            found = self._client.get_into(key, buffer)
            assert found in (None, size)
        else:
            got = self._client.get(key)
            found, buffer = None if got is None else len(got), got or buffer
        assert found is None or buffer == data, f"{key!r} has other bytes"
        self.counts["hit" if found else "miss"] += 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_store_that_is_killed_again_and_again(transport: str, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KV_TRANSPORTS_DIR", str(sockets))
    print("seed", SEED_OF_TEST)
    progress, workers, port = threading.Semaphore(0), list[Worker](), 0
    with contextlib.ExitStack() as stack:
        for turn in range(ROUNDS):
            with store_at(port, transport, sockets) as (child, port):
                if not turn:
                    client = KVClient(f"127.0.0.1:{port}", namespace=NAME, transports=transport, timeout_s=10.0)
                    workers += [Worker(stack.enter_context(client), number, progress) for number in range(2)]
                    for worker in workers:
                        worker.start()
                for _ in range(100 * (turn + 1)):
                    assert progress.acquire(timeout=60), [worker.failure for worker in workers]
                child.send_signal(signal.SIGKILL)
        for worker in workers:
            worker.stop.set()
            worker.join(30)
            assert not worker.is_alive()
            assert worker.failure is None, worker.failure
    total = workers[0].counts + workers[1].counts
    assert all(total[what] for what in ("put", "hit", "miss", "lost")), total
