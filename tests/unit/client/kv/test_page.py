"""docs/kvclient.md: every example runs, and every call of the clients has one."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from moonpool.client.kv import AsyncKVClient, KVClient
from tests.unit.kvstore.rig import rig

PAGE = (Path(__file__).parents[4] / "docs/kvclient.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ADDRESS = "127.0.0.1:50060"


def run(source: str) -> None:
    namespace: dict[str, Any] = {"__name__": "docs/kvclient.md"}
    exec(compile(source, "docs/kvclient.md", "exec"), namespace)


@pytest.mark.parametrize("transports", ["local", "grpc"])
async def test_every_example_runs(transports: str, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KV_TRANSPORTS_DIR", str(sockets))
    monkeypatch.setenv("MOONPOOL_KV_TRANSPORTS", transports)
    async with rig(kv_transports=transports, dram_bytes=64 << 20) as store:
        assert ADDRESS in EXAMPLES[0]
        await asyncio.to_thread(run, "\n".join(EXAMPLES).replace(ADDRESS, store.address))
        await store.at_rest()


@pytest.mark.parametrize("kind", [KVClient, AsyncKVClient])
def test_every_call_has_an_example(kind: type) -> None:
    source = "\n".join(EXAMPLES)
    calls = {name for name in vars(kind) if not name.startswith("_")} - {"aclose"}  # `async with` calls it
    assert {name for name in calls if not re.search(rf"\.{name}\b", source)} == set()
