"""What TLS costs beside plaintext: a connection, and KV through `Put`: `python -m benchmarks.tls [--json]`.

Two kvstores, one with certificates. Each measured pair is TLS, then plaintext: a new channel with one health check,
and a stretch of puts over a stream that is open already, with the processor seconds of both sides.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.frame import Progress, Row, paired, run
from benchmarks.kv_paths import SMALL, PutPath, filled_pool
from benchmarks.processes import Child, child, own_cpu_s
from moonpool.base.kv.pool import KVPool
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.tls import Tls
from moonpool.base.rpc.tuning import tune_gc, tune_grpc, tune_malloc
from moonpool.cli.certs import Authority

FRAMES = (64 << 10, 1 << 20)
STORE_BYTES = 512 << 20
CONNECTIONS = 20
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Side:
    """A store, and the way to it."""

    store: Child
    channels: Channels

    async def connect_s(self) -> float:
        """Seconds of a new connection with a health check, the mean of some."""
        begin = time.perf_counter()
        for _ in range(CONNECTIONS):
            await self.channels.probe(self.store.address, TIMEOUT_S)
        return (time.perf_counter() - begin) / CONNECTIONS

    async def stretch(self, path: PutPath, nbytes: int) -> tuple[float, float]:
        """GB/s, and processor seconds per GB of both sides."""
        nbytes = -(-nbytes // SMALL.transfer_bytes) * SMALL.transfer_bytes
        cpu, begin = own_cpu_s() + self.store.cpu_s(), time.perf_counter()
        await path.send(nbytes)
        seconds = time.perf_counter() - begin
        return nbytes / seconds / 1e9, (own_cpu_s() + self.store.cpu_s() - cpu) / nbytes * 1e9


@contextlib.asynccontextmanager
async def sides(folder: Path) -> AsyncIterator[tuple[Side, Side]]:
    """The store with TLS, and the other one."""
    authority = Authority.at(folder)
    for role in ("kvstore", "prefill"):
        authority.issue(folder, role, role, [], 1)
    flags = ("--dram-bytes", str(STORE_BYTES), "--log-level", "warning")
    names = {"tls_cert": "kvstore.pem", "tls_key": "kvstore.key", "tls_ca": "ca.pem"}
    files = [part for setting, name in names.items() for part in ("--set", f"{setting}={folder}/{name}")]
    tls = Tls(folder / "ca.pem", folder / "prefill.pem", folder / "prefill.key")
    with child("moonpool.kvstore", *flags, *files) as secured, child("moonpool.kvstore", *flags) as plain:
        async with Channels(tls) as encrypted, Channels() as channels:
            yield Side(secured, encrypted), Side(plain, channels)


async def frame_rows(both: Sequence[Side], pool: KVPool, frame_bytes: int, runs: int, nbytes: int) -> list[Row]:
    """Speed and cost of one size of frames."""
    paths = [PutPath(side.channels, side.store.address, pool, frame_bytes) for side in both]
    for path in paths:
        await path.send(2 * STORE_BYTES)  # every page at the far end has been touched
    found = [[await side.stretch(path, nbytes) for side, path in zip(both, paths, strict=True)] for _ in range(runs)]
    for path in paths:
        await path.aclose()
    name = f"Put with TLS, frames of {frame_bytes >> 10} KiB"
    speeds = [(tls[0], plain[0]) for tls, plain in found]
    costs = [(tls[1], plain[1]) for tls, plain in found]
    return [
        paired(name, "GB/s", speeds, "plaintext"),
        paired(f"{name}, processors", "s/GB", costs, "plaintext", less_is_better=True),
    ]


async def _measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    pool = filled_pool()
    with tempfile.TemporaryDirectory(prefix="moonpool-tls-") as folder:
        async with sides(Path(folder)) as both:
            times = [(await both[0].connect_s() * 1e3, await both[1].connect_s() * 1e3) for _ in range(options.runs)]
            rows = [paired("a new connection with TLS", "ms", times, "plaintext", less_is_better=True)]
            progress(f"{rows[0].name}: {rows[0].value:.1f} ms")
            for frame_bytes in FRAMES:
                rows += await frame_rows(both, pool, frame_bytes, options.runs, int(options.gigabytes * 1e9))
                progress(f"{rows[-2].name}: {rows[-2].value:.2f} GB/s, {rows[-2].ratio:.2f} of plaintext")
    pool.close()
    return rows


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    tune_malloc()
    tune_gc()
    tune_grpc()
    return uvloop.run(_measure(options, progress))


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--gigabytes", type=float, default=0.3, help="of each measured stretch (default 0.3)")


if __name__ == "__main__":
    run("tls", measure, flags=flags)
