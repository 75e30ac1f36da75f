"""kill -9 at any moment: what was DURABLE is there, everything else wholly or not at all."""

import subprocess
import sys
from pathlib import Path

from moonpool.kv.keys import BlockKey
from tests.unit.kvstore.helpers import Driven, data_of, keys_of, open_ssd

LIVES = 3
LINES = (5, 30, 61)


def test_durable_blocks_survive_kill_9(tmp_path: Path) -> None:
    durable: list[BlockKey] = []
    for life in range(LIVES):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.kvstore.crasher", str(tmp_path), str(life)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        for _ in range(LINES[life]):
            durable.append(BlockKey(bytes.fromhex(child.stdout.readline().decode().strip())))
        child.kill()
        rest = child.stdout.read().decode()
        child.wait(10)
        child.stdout.close()
        complete = rest[: rest.rfind("\n") + 1].split()
        durable += [BlockKey(bytes.fromhex(line)) for line in complete]
        ssd = open_ssd(tmp_path, capacity=1 << 30)
        try:
            ssd.check_invariants()
            assert set(durable) <= set(ssd)
            driven = Driven(ssd)
            for key in ssd:
                assert driven.read([key]) == [data_of(key)]
            known = {key for life in range(LIVES) for key in keys_of(len(durable) + 100, str(life))}
            assert set(ssd) <= known
        finally:
            ssd.close()
