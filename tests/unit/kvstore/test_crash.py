"""kill -9 at any moment: what was DURABLE is there, everything else wholly or not at all."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.repair import verify
from moonpool.kvstore.ssd.data_folder import Durability
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from tests.unit.kvstore.crasher import BATCH, CAPACITY, SEGMENT, kept_keys, tenant_of
from tests.unit.kvstore.helpers import LAYOUT, RECORD, data_of, keys_of, owner_of
from tests.unit.kvstore.invariants import check

MOST_LINES = 900


class Lives:
    """What the crasher has told over its lives."""

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.folder = folder
        self.durability = durability
        self.durable: set[BlockKey] = set()
        self.gone: set[BlockKey] = set()
        self.written = 0
        self.lives = 0

    def live(self, lines: int) -> None:
        """One life, killed after so many lines."""
        command = [sys.executable, "-m", "tests.unit.kvstore.crasher"]
        child = subprocess.Popen([*command, str(self.folder), str(self.lives), self.durability], stdout=subprocess.PIPE)
        assert child.stdout is not None
        told = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        told += child.stdout.read().splitlines(keepends=True)
        child.stdout.close()
        child.wait(60)
        self.lives += 1
        for line in told:
            if not line.endswith(b"\n"):
                continue  # it was cut off with the process
            assert len(line) == 66, "the crasher ended by itself"
            key = BlockKey(bytes.fromhex(line[1:].decode()))
            if line.startswith(b"+"):
                self.written += 1
                self.durable.add(key)
                self.gone.discard(key)
            else:
                self.durable.remove(key)
                self.gone.add(key)

    def check(self) -> None:
        """Block by block: durable ones are there, and nothing that was never written."""
        report = verify(self.folder)
        assert report.ok, report.faults
        ssd = open_tier([self.folder], CAPACITY, SEGMENT, durability=self.durability)
        try:
            check(ssd)
            here = set(ssd.catalogue)
            assert self.durable <= here
            assert kept_keys(self.lives) & self.durable <= here
            written = {key for life in range(self.lives) for key in keys_of(self.written + 100, str(life))}
            assert here - self.durable - self.gone <= written
            # Killed while it carried blocks over, it left them twice: the crasher checks that its next plan mends that.
            # Killed before it forgot what made room for a batch, it has both, with the same consequence; and killed
            # before the files were gone that made room for the batch before, these too.
            assert ssd.catalogue.live.total_bytes <= CAPACITY + 2 * BATCH * RECORD + SEGMENT
            assert ssd.used_bytes <= CAPACITY or ssd.has_housekeeping
            for key in here:
                self.check_block(ssd, key)
            self.durable, self.gone = here, set()
        finally:
            if self.durability == "power":
                ssd.close()
            else:
                ssd.abandon()

    def check_block(self, ssd: SsdTier, key: BlockKey) -> None:
        reader, out = ssd.reader(key), memoryview(bytearray(LAYOUT.block_bytes))
        reader.read_layers(0, out)
        reader.release()
        assert out == data_of(key)
        assert owner_of(ssd, key) == tenant_of(key)


@pytest.mark.parametrize("durability", ["power", "process"])
def test_durable_blocks_survive_kill_9(tmp_path: Path, durability: Durability) -> None:
    lives = Lives(tmp_path, durability)
    for lines in (30, 500):
        lives.live(lines)
        lives.check()
    assert lives.written > 250, "nothing was reclaimed"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("durability", ["power", "process"])
def test_durable_blocks_survive_fifty_kills(tmp_path: Path, durability: Durability) -> None:
    chance = random.Random(50)
    lives = Lives(tmp_path, durability)
    for _ in range(50):
        lives.live(chance.randrange(1, MOST_LINES))
        lives.check()
    print(f"{durability}: {lives.written} blocks made durable in 50 lives")
