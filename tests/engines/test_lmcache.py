"""LMCache's own tests of L2 adapters, on the adapter for kvstores."""

import asyncio
import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.servers import LMCACHE, PYTHON
from tests.unit.kvstore.rig import rig

KEYS, NUMBERS = 24, 32 << 10
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not (PYTHON.parents[1] / "lmcache.txt").exists(),
        reason="LMCache is not installed: `make test-engines` installs it",
    ),
]


def adapter(*stores: str, **settings: Any) -> str:
    """The setting by which LMCache keeps chunks in kvstores."""
    return json.dumps({
        "type": "plugin", "module_path": "moonpool.connectors.lmcache", "class_name": "MoonpoolL2Adapter",
        "adapter_params": {"stores": list(stores), **settings},
    })  # fmt: skip


async def lmcache(folder: Path, module: str, *arguments: str) -> str:
    """What a module prints, run by LMCache's Python."""
    path = folder / f"{uuid.uuid4().hex}.log"
    process = await LMCACHE.start(path, module, *arguments)
    try:
        status = await asyncio.to_thread(process.wait)
    finally:
        process.kill()
    told = path.read_text()
    print(told)
    assert status == 0
    return told


def shares(told: str) -> Sequence[tuple[str, str]]:
    """The counts "so many of so many" in a report."""
    return re.findall(r"Validation[^:]*: (\d+)/(\d+)", told)


async def test_the_adapter_passes_lmcaches_own_test(tmp_path: Path) -> None:
    check = ["lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", str(KEYS)]
    async with rig(dram_bytes=256 << 20) as first, rig(dram_bytes=256 << 20) as second:
        spec = adapter(first.address, second.address)
        told = await lmcache(tmp_path, *check, "--obj-size", str(NUMBERS), "--l2-adapter", spec)
    assert shares(told) == [(str(KEYS), str(KEYS))] * 4  # absent, found, loaded, equal
    assert "Batch store OK" in told
    assert "FAIL" not in told


async def test_the_adapter_passes_lmcaches_benchmark_and_what_is_loaded_was_stored(tmp_path: Path) -> None:
    bench = ["lmcache.cli.main", "bench", "l2", "--num-keys", "16", "--rounds", "3", "--in-flight", "2"]
    async with rig(dram_bytes=256 << 20) as store:
        told = await lmcache(tmp_path, *bench, "--no-skip-verify", "--l2-adapter", adapter(store.address))
    assert "keys data verified OK" in told


async def test_chunks_outlive_the_process_and_gone_stores_are_misses(tmp_path: Path) -> None:
    program = "tests.engines.lmcache_program"
    async with rig(dram_bytes=256 << 20) as store:
        spec = adapter(store.address, breaker_failures=1)
        assert "stored 8 of 8" in await lmcache(tmp_path, program, spec, "store")
        assert "found 8 of 8, loaded 8, equal 8" in await lmcache(tmp_path, program, spec, "load")
        assert "found 0 of 8, loaded 0, equal 0" in await lmcache(
            tmp_path, program, adapter(store.address, tenant="ann"), "load"
        )
        assert "deleted 8, listeners know 8" in await lmcache(tmp_path, program, spec, "delete")
        assert "found 0 of 8, loaded 0, equal 0" in await lmcache(tmp_path, program, spec, "load")
    told = await lmcache(tmp_path, program, spec, "store")
    assert "stored 0 of 8" in told
    assert "healthy False" in told
