"""KV frames between two processes over the real `ReceiveKV`, `Put` and `Get`, by transport, beside raw TCP and copies.

`python -m benchmarks.kv_stream [--json]`. The near ends are the real clients (`TransferSender`, `StoreWriter`,
`BlockReader`), the far ends the real services' halves: decode's receiver with its pool and requests but no engine, and
a kvstore; for "tls" there is a second pair of far ends, with certificates. Each measured pair is ours, then raw TCP in
blocking writes of the frame's size, one after the other. "The same KV" is sent from the same pool and read into as much
memory as decode's pool has; "one buffer" is sent again and again, from cache to cache. Also measured: that memory does
not grow while many gigabytes pass, and how far a sender gets ahead of a stopped reader.
"""

import argparse
import asyncio
import contextlib
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvloop

from benchmarks.frame import Progress, Row, Skipped, bounded, paired, run
from benchmarks.kv_paths import SMALL, TLS_NAME, DecodePath, GetPath, Path, PutPath, dialers, filled_pool
from benchmarks.limits import MEMORY_BYTES, copy_bytes_per_s, tcp_seconds
from benchmarks.processes import Child, child, own_cpu_s, own_resident_bytes
from moonpool.base.kv.pool import KVPool
from moonpool.base.kv_transfer.read_server import WINDOW_BYTES
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.tls import Tls
from moonpool.base.rpc.tuning import tune_gc, tune_grpc, tune_malloc
from moonpool.base.transport.dialer import TransportDialer
from moonpool.cli.certs import Authority

FRAMES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
TARGET_FRAME = 1 << 20
TARGETS: dict[str, float | None] = {"grpc": 0.5, "tcp": 0.75, TLS_NAME: None, "local": 1.0, "nixl": None}
"""By transport: share of raw TCP's speed with frames of TARGET_FRAME; None: no target."""
LOCAL_GB_PER_S = 3.0
KINDS = ("ReceiveKV", "Put", "Get")
SWEPT = {("ReceiveKV", "grpc"), ("Put", "grpc")}
"""Measured at every frame size."""
GROWTH_LIMIT_MB = 64.0
"""Growth that does not count: buffers that were not needed before."""
STILL_S = 1.0
"""A sender that makes no progress for so long has been stopped by its credits."""
STORE_BYTES = 512 << 20
TRANSPORTS = ("--kv-transports", "local,tcp,nixl")


@dataclass(frozen=True, slots=True)
class Sample:
    """One stretch of bytes on one path."""

    bytes_per_s: float
    cpu_s_per_byte: float


@dataclass(frozen=True, slots=True)
class FarEnds:
    """Processes to which KV goes, and channels to the store. Calls to a decode of this benchmark are always plain."""

    channels: Channels
    decode: Child
    store: Child


@dataclass(slots=True)
class Bench:
    """One benchmark's processes, and a stretch's length; `secured` have certificates."""

    pool: KVPool
    plain: FarEnds
    secured: FarEnds
    raw: Child
    nbytes: int
    dialers: dict[str, TransportDialer]
    window_bytes: int = WINDOW_BYTES

    def path(self, kind: str, transport: str, frame_bytes: int) -> tuple[Path, Child]:
        """A way to a far end, and the process there. The store chooses the frames of `Get`."""
        far, dialer = self.secured if transport == TLS_NAME else self.plain, self.dialers[transport]
        if kind == "ReceiveKV":
            return DecodePath(self.plain.channels, far.decode.address, self.pool, frame_bytes, dialer), far.decode
        if kind == "Get":
            return GetPath(far.channels, far.store.address, self.pool, dialer), far.store
        return PutPath(far.channels, far.store.address, self.pool, frame_bytes, dialer), far.store

    async def ours(self, path: Path, far: Child) -> Sample:
        """One stretch over one of our paths."""
        nbytes = -(-self.nbytes // SMALL.transfer_bytes) * SMALL.transfer_bytes
        cpu, begin = own_cpu_s() + far.cpu_s(), time.perf_counter()
        await path.send(nbytes)
        seconds = time.perf_counter() - begin
        return Sample(nbytes / seconds, (own_cpu_s() + far.cpu_s() - cpu) / nbytes)

    def tcp(self, frame_bytes: int, *, one_buffer: bool = False) -> Sample:
        """One stretch over raw TCP: the same KV into as much memory, or one buffer's bytes into one buffer."""
        nbytes = self.nbytes // frame_bytes * frame_bytes
        source = self.pool.parts[0].view
        far_bytes = frame_bytes if one_buffer else MEMORY_BYTES
        cpu = own_cpu_s() + self.raw.cpu_s()
        seconds = tcp_seconds(
            self.raw.address, source[:frame_bytes] if one_buffer else source, frame_bytes, nbytes, far_bytes
        )
        return Sample(nbytes / seconds, (own_cpu_s() + self.raw.cpu_s() - cpu) / nbytes)

    def copy(self, frame_bytes: int) -> float:
        """Bytes per second of copies in memory."""
        return copy_bytes_per_s(frame_bytes, min(self.nbytes, 1 << 29))


@contextlib.asynccontextmanager
async def far_ends(tls: Tls | None, *settings: str) -> AsyncIterator[FarEnds]:
    """Start a decode instance and a store with these settings."""
    decode = (
        "--conductor",
        "127.0.0.1:1",
        "--model",
        "small",
        "--set",
        f"blocks={4 * SMALL.blocks}",
        "--log-level",
        "warning",
        *TRANSPORTS,
    )
    store = ("--dram-bytes", str(STORE_BYTES), "--log-level", "warning", *TRANSPORTS)
    with (
        child("benchmarks.kv_decode", *decode, *settings) as decode_child,
        child("moonpool.kvstore", *store, *settings) as store_child,
    ):
        async with Channels(tls) as channels:
            yield FarEnds(channels, decode_child, store_child)


@contextlib.asynccontextmanager
async def bench(nbytes: int) -> AsyncIterator[Bench]:
    """Start the far ends."""
    pool = filled_pool()
    with tempfile.TemporaryDirectory() as name, child("benchmarks.limits") as raw:
        folder = pathlib.Path(name)
        authority = Authority.at(folder)
        authority.issue(folder, "prefill", "prefill", [], 1)
        files = {"tls_ca": folder / "ca.pem", "tls_cert": folder / "prefill.pem", "tls_key": folder / "prefill.key"}
        tls = Tls(files["tls_ca"], files["tls_cert"], files["tls_key"])
        settings = [part for name, path in files.items() for part in ("--set", f"{name}={path}")]
        async with far_ends(None) as plain, far_ends(tls, *settings) as secured:
            yield Bench(pool, plain, secured, raw, nbytes, dialers(pool, tls))
    pool.close()


async def speed_rows(
    setup: Bench, kind: str, transport: str, frame_bytes: int, runs: int, progress: Progress
) -> list[Row]:
    """Bytes per second and processor seconds per byte on one transport at one frame size."""
    path, far = setup.path(kind, transport, frame_bytes)
    await path.send(2 * STORE_BYTES)  # every page at the far end has been touched
    ours, raw, hot, copies = [], [], [], []
    for _ in range(runs):
        ours.append(await setup.ours(path, far))
        raw.append(setup.tcp(frame_bytes))
        hot.append(setup.tcp(frame_bytes, one_buffer=True))
        copies.append(Sample(setup.copy(frame_bytes), 0.0))
    if path.transport != transport:
        raise RuntimeError(f"{kind} went over {path.transport}, not {transport}")
    await path.aclose()
    name = f"{kind} over {transport}, frames of {frame_bytes >> 10} KiB"

    def speeds(limit: list[Sample], limit_name: str, target: float | None = None) -> Row:
        pairs = [(own.bytes_per_s / 1e9, other.bytes_per_s / 1e9) for own, other in zip(ours, limit, strict=True)]
        return paired(name, "GB/s", pairs, limit_name, target=target)

    row = speeds(raw, "raw TCP, the same KV", TARGETS[transport] if frame_bytes == TARGET_FRAME else None)
    progress(f"{name}: {row.value:.2f} GB/s, {row.ratio:.2f} of raw TCP")
    costs = [(own.cpu_s_per_byte * 1e9, other.cpu_s_per_byte * 1e9) for own, other in zip(ours, raw, strict=True)]
    least = [
        paired(
            f"{name}, least", "GB/s", [(own.bytes_per_s / 1e9, LOCAL_GB_PER_S) for own in ours], "wanted", target=1.0
        )
    ]
    return [
        row,
        *(least if transport == "local" else []),
        speeds(hot, "raw TCP, one buffer"),
        speeds(copies, "copy in memory"),
        paired(f"{name}, processors", "s/GB", costs, "raw TCP, the same KV", less_is_better=True),
    ]


async def growth_rows(setup: Bench, kind: str, transport: str, total_bytes: int, progress: Progress) -> list[Row]:
    """Growth of resident memory on both sides while many bytes pass."""
    path, far = setup.path(kind, transport, TARGET_FRAME)
    await path.send(SMALL.transfer_bytes)
    ours, theirs = own_resident_bytes(), far.resident_bytes()
    sent, grown = 0, [0.0]
    while sent < total_bytes:
        step = min(1 << 30, total_bytes - sent)
        await path.send(step)
        sent += step
        grown.append((own_resident_bytes() - ours + far.resident_bytes() - theirs) / 1e6)
    await path.aclose()
    progress(f"{kind} over {transport}: memory after {sent / 1e9:.1f} GB: {grown[-1]:+.0f} MB")
    return [
        bounded(
            f"{kind} over {transport}, growth of memory over {sent / 1e9:.0f} GB",
            "MB",
            [max(grown)],
            "allowed",
            GROWTH_LIMIT_MB,
        )
    ]


async def slow_reader_row(setup: Bench, progress: Progress) -> Row:
    """How far a sender gets ahead of a reader that stops in the middle of a transfer, and continues later."""
    path = DecodePath(setup.plain.channels, setup.plain.decode.address, setup.pool, TARGET_FRAME, setup.dialers["grpc"])
    await path.transfer()
    path.layer_sent.clear()
    work = asyncio.ensure_future(path.transfer())
    await path.layer_sent.wait()
    setup.plain.decode.signal(signal.SIGSTOP)
    at_stop, moved_at = path.sent_bytes, time.monotonic()
    seen = at_stop
    while time.monotonic() - moved_at < STILL_S and not work.done():
        await asyncio.sleep(0.01)
        if path.sent_bytes != seen:
            seen, moved_at = path.sent_bytes, time.monotonic()
    setup.plain.decode.signal(signal.SIGCONT)
    await work
    await path.aclose()
    ahead = seen - at_stop
    progress(f"a stopped reader: the sender stopped after {ahead / 1e6:.1f} MB")
    return bounded("ReceiveKV, sent after the reader stopped", "MB", [ahead / 1e6], "window", setup.window_bytes / 1e6)


async def _measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    rows: list[Row] = []
    async with bench(int(options.gigabytes * 1e9)) as setup:
        wanted = [name for name in options.transports.split(",") if name in setup.dialers]
        if left := set(options.transports.split(",")).difference(wanted):
            progress(f"skipped, as this machine lacks what they need: {', '.join(sorted(left))}")
        for kind in KINDS:
            for transport in wanted:
                for frame_bytes in FRAMES if (kind, transport) in SWEPT else (TARGET_FRAME,):
                    rows += await speed_rows(setup, kind, transport, frame_bytes, options.runs, progress)
        rows.append(await slow_reader_row(setup, progress))
        for kind in KINDS:
            for transport in wanted:
                rows += await growth_rows(setup, kind, transport, int(options.growth_gigabytes * 1e9), progress)
    return rows


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    if not sys.platform.startswith("linux"):
        raise Skipped("processes are measured through /proc, which only Linux has")
    tune_malloc()
    tune_gc()
    tune_grpc()
    return uvloop.run(_measure(options, progress))


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of each measured stretch (default 0.5)")
    parser.add_argument("--transports", default=",".join(TARGETS), help="which, with commas between them (default all)")
    parser.add_argument(
        "--growth-gigabytes", type=float, default=20.0, help="that pass while memory is watched (default 20)"
    )


if __name__ == "__main__":
    run("kv_stream", measure, flags=flags)
