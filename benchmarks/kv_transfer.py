"""A 2k prompt's KV of the 0.5B shape from prefill to decode, by transport: from the last layer computed to the join.

`python -m benchmarks.kv_transfer [--json] [--transports grpc,tcp,local] [--layer-ms 50]`. The near end is the real
`TransferSender`, the far end decode's real receiver without an engine (kv_decode.py). No layer is computed: each is
ready `--layer-ms` after the one before, and is sent while the next one would be computed, as prefill does; so the
processors are free, which in prefill they are not. "At once" is the whole prompt, ready in one moment. The time ends
when decode's word is back that it has all of it: in the moment in which it sends that, the sequence joins its batch.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

import uvloop

from benchmarks.frame import Progress, Row, Skipped, paired, run
from benchmarks.kv_paths import HALF_B, DecodePath, dialers, filled_pool
from benchmarks.limits import MEMORY_BYTES, tcp_seconds
from benchmarks.processes import child
from moonpool.base.kv.frames import FRAME_BYTES
from moonpool.base.kv.pool import KVPool
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.tuning import tune_gc, tune_grpc, tune_malloc

TRANSPORTS = ("grpc", "tcp", "local")
TRANSFERS = 5
"""Of which one figure of a run is the median."""


def raw_ms(address: str, pool: KVPool, nbytes: int) -> float:
    """Milliseconds that so many bytes take over raw TCP, the connection open already."""
    source = pool.parts[0].view[:nbytes]
    times = [tcp_seconds(address, source, min(FRAME_BYTES, nbytes), nbytes, MEMORY_BYTES) for _ in range(TRANSFERS)]
    return statistics.median(times) * 1e3


async def transport_rows(
    path: DecodePath, transport: str, raw_address: str, pool: KVPool, options: argparse.Namespace, progress: Progress
) -> list[Row]:
    """Both figures for one transport."""
    layout = HALF_B.layout
    layer_bytes = HALF_B.blocks * layout.slice_bytes(0)
    rows = []
    for how, layer_s, nbytes in (
        ("layer by layer", options.layer_ms / 1e3, layer_bytes),
        ("at once", 0.0, HALF_B.transfer_bytes),
    ):
        await path.computed(0.0)  # connects, and touches memory
        pairs = []
        for _ in range(options.runs):
            ours = statistics.median([await path.computed(layer_s) * 1e3 for _ in range(TRANSFERS)])
            pairs.append((ours, raw_ms(raw_address, pool, nbytes)))
        limit = f"raw TCP, {nbytes >> 20} MiB"
        rows.append(paired(f"2k prompt over {transport}, {how}", "ms", pairs, limit, less_is_better=True))
        progress(f"{rows[-1].name}: {rows[-1].value:.2f} ms; {limit} {rows[-1].limit_value:.2f} ms")
    if path.transport != transport:
        raise RuntimeError(f"it went over {path.transport}, not {transport}")
    return rows


async def _measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    pool = filled_pool(HALF_B)
    rows: list[Row] = []
    blocks = str(4 * HALF_B.blocks)
    decode = ("--conductor", "127.0.0.1:1", "--model", "0.5b", "--set", f"blocks={blocks}", "--log-level", "warning")
    with (
        child("benchmarks.kv_decode", *decode, "--kv-transports", "local,tcp") as far,
        child("benchmarks.limits") as raw,
    ):
        async with Channels() as channels:
            ends = dialers(pool)
            for transport in options.transports.split(","):
                path = DecodePath(channels, far.address, pool, FRAME_BYTES, ends[transport], HALF_B)
                rows += await transport_rows(path, transport, raw.address, pool, options, progress)
                await path.aclose()
    pool.close()
    return rows


def measure(options: argparse.Namespace, progress: Progress) -> Sequence[Row]:
    """All rows."""
    if not sys.platform.startswith("linux"):
        raise Skipped("only Linux has all transports")
    tune_malloc()
    tune_gc()
    tune_grpc()
    return uvloop.run(_measure(options, progress))


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument(
        "--transports", default=",".join(TRANSPORTS), help="which, with commas between them (default all)"
    )
    parser.add_argument(
        "--layer-ms", type=float, default=50.0, help="between two layers (default 50, about what two cores take)"
    )


if __name__ == "__main__":
    run("kv_transfer", measure, flags=flags)
