"""Operating a running kvstore, through `moonpool kvstore ...` and Prometheus."""

import asyncio
import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from moonpool.base.errors import ConfigError, InvalidRequest, Unsupported
from moonpool.base.kv.reuse_stats import ReuseSample
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.cli.kvstore import app
from moonpool.kvstore.operations import StoreOperations
from tests.unit.kvstore.helpers import Driven, data_of, keys_of
from tests.unit.kvstore.process import running
from tests.unit.kvstore.test_process import durable, put, read

KEYS = keys_of(4)
BYTES = sum(len(data_of(key)) for key in KEYS)


async def cli(*args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(args))


async def gauges(address: str) -> dict[str, float]:
    return dict(json.loads((await cli("stat", address, "--json")).stdout))


async def test_warm_after_a_restart(tmp_path: Path) -> None:
    flags = ["--data-dir", str(tmp_path / "d"), "--dram-bytes", str(1 << 20), "--ssd-bytes", str(8 << 20)]
    async with running(tmp_path / "log", *flags) as store:
        await put(store.address, KEYS)
        await durable(store.address, len(KEYS))
        await store.end(signal.SIGKILL)
    async with running(tmp_path / "log", *flags) as store:
        assert (await gauges(store.address))["dram_blocks"] == 0
        answer = await cli("warm", store.address, "--max-bytes", str(len(data_of(KEYS[0]))), "--json")
        assert json.loads(answer.stdout) == {"blocks": 1, "bytes": len(data_of(KEYS[0]))}
        rest = await cli("warm", store.address)
        assert rest.stdout.startswith("3 blocks"), rest.output
        after = await gauges(store.address)
        assert (after["dram_blocks"], after["dram_bytes"], after["ssd_hits_total"]) == (4, BYTES, 0)
        assert await read(store.address, KEYS) == [data_of(key) for key in KEYS]
        assert ((await gauges(store.address))["dram_hits_total"]) == 4
        assert (await cli("stat", store.address)).exit_code == 0


async def test_compact_and_verify(tmp_path: Path) -> None:
    flags = ["--data-dir", str(tmp_path / "d"), "--dram-bytes", str(1 << 20), "--ssd-bytes", str(8 << 20)]
    async with running(tmp_path / "log", *flags) as store:
        await put(store.address, KEYS)
        await durable(store.address, len(KEYS))
        compacted = json.loads((await cli("compact", store.address, "--json")).stdout)
        assert compacted["segments"] == 0, "the only one is in use"
        with pytest.raises(ConfigError, match="used by another process"):
            raise_from(await cli("verify", str(tmp_path / "d")))
        await store.end(signal.SIGTERM)
    found = json.loads((await cli("verify", str(tmp_path / "d"), "--json")).stdout)
    assert (found["blocks"], found["faults"], found["index_error"]) == (4, 0, None)
    async with running(tmp_path / "log", *flags) as store:
        compacted = json.loads((await cli("compact", store.address, "--min-live-share", "1", "--json")).stdout)
        assert compacted["segments"] == 1
        assert await read(store.address, KEYS) == [data_of(key) for key in KEYS]
        await store.end(signal.SIGTERM)
    (segment,) = (tmp_path / "d" / "segments").glob("*.seg")
    damaged = bytearray(segment.read_bytes())
    damaged[damaged.index(data_of(KEYS[2])[:64])] ^= 1
    segment.write_bytes(damaged)
    checked = await cli("verify", str(tmp_path / "d"))
    assert checked.exit_code == 1
    assert re.search(r"segment \d+, offset \d+: ", checked.stdout)


async def test_advise(tmp_path: Path) -> None:
    async with running(tmp_path / "log", "--dram-bytes", str(1 << 20)) as store:
        assert "no block was asked for twice" in (await cli("advise", store.address)).stdout
        await put(store.address, KEYS)
        await read(store.address, KEYS)
        await read(store.address, KEYS)
        advised = json.loads((await cli("advise", store.address, "--more-gb", "1", "--json")).stdout)
        assert advised["references"] == 8
        assert advised["points"][-1]["hit_share"] == 0.5  # the first reading counts as misses
        assert advised["points"][-1]["bytes"] >= BYTES
        assert advised["with_more"] == advised["now"] == 0.5  # all of them fit as it is
        drawn = tmp_path / "curve.svg"
        text = (await cli("advise", store.address, "--picture", str(drawn))).stdout
        assert "another 100 GB would add 0.0 points" in text
        assert "Hit share over size" in drawn.read_text()


async def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    async with running(tmp_path / "log") as store:
        for verb in ("compact", "warm"):
            with pytest.raises(Unsupported, match="no SSD tier"):
                raise_from(await cli(verb, store.address))
    with pytest.raises(ConfigError, match="data_dir"):
        raise_from(await cli("verify", "/nowhere"))


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_no_such_share(share: float) -> None:
    operations = StoreOperations(Driven().store, Any, ByteCredits(1), ReuseSample(), 0, lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="min_live_share"):
        operations.compact(share)


async def test_metrics(tmp_path: Path) -> None:
    flags = ["--data-dir", str(tmp_path / "d"), "--metrics-listen", "127.0.0.1:0"]
    async with running(tmp_path / "log", *flags) as store:
        await put(store.address, KEYS)
        await durable(store.address, len(KEYS))
        await read(store.address, KEYS)
        found = re.search(r"metrics.*?(127\.0\.0\.1:\d+)", re.sub(r"\x1b\[[0-9;]*m", "", store.log_path.read_text()))
        assert found
        url = f"http://{found[1]}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    for line in (
        "moonpool_kvstore_dram_blocks 4.0",
        "moonpool_kvstore_dram_hits_total 4.0",
        'moonpool_kvstore_read_seconds_count{tier="dram"} 1.0',
        "moonpool_kvstore_ssd_write_amplification ",
    ):
        assert line in text, line
    assert re.search(r"moonpool_kvstore_commit_seconds_count [1-9]", text)


def raise_from(result: Result) -> None:
    assert result.exception is not None, result.output
    raise result.exception
