"""`moonpool kvstore stat|verify|compact|warm|advise`: inspects and maintains a kvstore."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from moonpool.cli.hit_curve import advice, draw, hit_share
from moonpool.errors import DeadlineExceeded
from moonpool.rpc.errors import from_rpc_error
from moonpool.rpc.tls import open_blocking_channel
from moonpool.v1 import kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

CALL_TIMEOUT_S = 10.0
PAUSE_S = 0.2
EXIT_FAULTY = 1
GB = 1e9

app = typer.Typer(name="moonpool kvstore", help="Inspect and maintain kvstores.", add_completion=False)
VERBS = ("stat", "verify", "compact", "warm", "advise")

Store = Annotated[str, typer.Argument(help="The kvstore, HOST:PORT.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def _store(address: str) -> Iterator[KVStoreServiceStub]:
    """A stub; a gRPC error is raised as the `MoonpoolError` of its status."""
    try:
        with open_blocking_channel(address) as channel:
            yield KVStoreServiceStub(channel)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


def _gauges(stub: KVStoreServiceStub) -> dict[str, float]:
    answer = stub.KVStoreStats(kvstore_pb2.KVStoreStatsRequest(), timeout=CALL_TIMEOUT_S)
    return {gauge.name: gauge.value for gauge in answer.gauges}


@app.command()
def stat(address: Store, as_json: Json = False) -> None:
    """Show the figures of a running kvstore."""
    with _store(address) as stub:
        gauges = _gauges(stub)
    if as_json:
        typer.echo(json.dumps(gauges))
        return
    table = Table("figure", "value")
    table.columns[1].justify = "right"
    for name, value in gauges.items():
        table.add_row(name, f"{value:,.3f}".rstrip("0").rstrip("."))
    hits, misses = gauges["dram_hits_total"] + gauges["ssd_hits_total"], gauges["misses_total"]
    if hits + misses:
        table.add_row("hit share", f"{hits / (hits + misses):.1%}")
    Console().print(table)


@app.command()
def verify(
    data_dir: Annotated[Path, typer.Argument(help="Data folder of a kvstore that does not run.")],
    as_json: Json = False,
) -> None:
    """Check every record of a data folder against its checksums, and the index against the records. Changes nothing.

    Exits with 1 when a fault is found. A kvstore would answer the faulty blocks with a miss.
    """
    from services.kvstore.operate.verify import verify as check

    with _progress("segments", hidden=as_json) as advance:
        report = check(data_dir, advance)
    if as_json:
        faults = [
            {"segment": f.segment, "offset": f.offset, "key": f.key.hex() if f.key else None, "what": f.what}
            for f in report.faults
        ]
        counts = {name: getattr(report, name) for name in ("segments", "records", "blocks", "dead", "bytes_read")}
        typer.echo(
            json.dumps({**counts, "index_error": report.index_error, "faults": report.fault_count, "first": faults})
        )
    else:
        typer.echo(
            f"{report.segments} segments, {report.records} records, {report.blocks} intact blocks, "
            f"{report.dead} dead records, {report.bytes_read / GB:.3f} GB read"
        )
        if report.index_error:
            typer.echo(f"index: {report.index_error}; a start will rebuild it")
        for fault in report.faults:
            typer.echo(f"segment {fault.segment}, offset {fault.offset}: {fault.what}")
    raise typer.Exit(0 if report.ok else EXIT_FAULTY)


@app.command()
def compact(
    address: Store,
    min_live_share: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Rewrite segments with a smaller share of live bytes; 0 = the store's default."
        ),
    ] = 0.0,
    wait_s: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the end; 0 = do not.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Rewrite segments of the SSD tier that hold few live blocks."""
    with _store(address) as stub:
        before = _gauges(stub)
        request = kvstore_pb2.CompactRequest(min_live_share=min_live_share)
        segments = stub.Compact(request, timeout=CALL_TIMEOUT_S).segments
        if segments and wait_s:
            _until(lambda: not _gauges(stub)["ssd_housekeeping"], wait_s, "compaction has not finished")
        after = _gauges(stub)
    freed = before["ssd_bytes"] - after["ssd_bytes"]
    if as_json:
        typer.echo(json.dumps({"segments": segments, "freed_bytes": freed}))
    else:
        typer.echo(f"{segments} segments rewritten, {freed / GB:.3f} GB freed")


@app.command()
def warm(
    address: Store,
    max_bytes: Annotated[int, typer.Option(min=0, help="Bytes at most; 0 = as many as fit.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds it may take.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Fill a kvstore's free DRAM from its SSD tier, the most recently written blocks first."""
    with _store(address) as stub:
        warmed = stub.Warm(kvstore_pb2.WarmRequest(max_bytes=max_bytes), timeout=timeout_s)
    if as_json:
        typer.echo(json.dumps({"blocks": warmed.blocks, "bytes": warmed.bytes}))
    else:
        typer.echo(f"{warmed.blocks} blocks, {warmed.bytes / GB:.3f} GB now in DRAM")


@app.command()
def advise(
    address: Store,
    more_gb: Annotated[float, typer.Option(min=0.0, help="GB that would be added.")] = 100.0,
    picture: Annotated[Path | None, typer.Option(help="Draw the curve into this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate the hit share of a larger kvstore, from sampled reuse distances."""
    with _store(address) as stub:
        told = stub.ReuseCurve(kvstore_pb2.ReuseCurveRequest(), timeout=CALL_TIMEOUT_S)

    curve = [(point.bytes, point.hit_share) for point in told.points]
    now_bytes, more_bytes = told.capacity_bytes, max(1, round(more_gb * GB))
    if picture is not None:
        picture.write_text(draw(curve, now_bytes, more_bytes), encoding="utf-8")
    if as_json:
        points = [{"bytes": nbytes, "hit_share": share} for nbytes, share in curve]
        facts = {"references": told.references, "sampled": told.sampled, "capacity_bytes": now_bytes}
        shares = {"now": hit_share(curve, now_bytes), "with_more": hit_share(curve, now_bytes + more_bytes)}
        typer.echo(json.dumps({**facts, **shares, "more_gb": more_gb, "points": points}))
    elif not curve:
        typer.echo("no block was asked for twice since this kvstore started")
    else:
        typer.echo(advice(curve, now_bytes, more_bytes))
        typer.echo(f"({told.references} blocks asked for, {told.sampled:.1%} of all blocks followed)")


@contextmanager
def _progress(what: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task(what)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def _until(done: Callable[[], bool], wait_s: float, what: str) -> None:
    """Waits until something holds; raises DeadlineExceeded when it does not in time."""
    deadline, pause = time.monotonic() + wait_s, threading.Event()
    while not done():
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"{what} after {wait_s:g} s")
        pause.wait(PAUSE_S)


def run(args: list[str]) -> None:
    """Runs `moonpool kvstore VERB ...`; errors are raised, for the caller to print."""
    app(args, prog_name="moonpool kvstore")
