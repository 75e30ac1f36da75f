"""`moonpool kvstore stat|verify|compact|warm|advise|add-key|drop-keys`: inspects and maintains a kvstore."""

import bisect
import html
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from moonpool.base.errors import DeadlineExceeded
from moonpool.base.rpc.errors import from_rpc_error
from moonpool.base.rpc.tls import open_blocking_channel
from moonpool.base.sizes import size_option
from moonpool.cli.help_pages import with_pages
from moonpool.cli.options import HELP
from moonpool.cli.tables import RecordTable, size_text, stdout_console
from moonpool.cli.whole_words import say
from moonpool.v1 import kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 696, 48, 316
"""The picture's size, and the curve's edges."""
HitCurve = Sequence[tuple[int, float]]
"""(bytes, share of block uses that would be hits), ascending in both."""


def hit_share(curve: HitCurve, size: float) -> float:
    """The hit share at a size; between two points on the curve, the smaller point's share."""
    place = bisect.bisect_right(curve, size, key=lambda point: point[0])
    return curve[place - 1][1] if place else 0.0


def capacity_advice(curve: HitCurve, now_bytes: int, more_bytes: int) -> str:
    """What a larger store would bring, in one sentence."""
    before, after, most = (hit_share(curve, size) for size in (now_bytes, now_bytes + more_bytes, math.inf))
    return (
        f"{size_text(now_bytes)} hit {100 * before:.1f} %; another {size_text(more_bytes)} would add "
        f"{100 * (after - before):.1f} points; no size hits more than {100 * most:.1f} %"
    )


def draw_hit_curve(curve: HitCurve, now_bytes: int, more_bytes: int) -> str:
    """An SVG file: hit share over bytes (logarithmic), the present and the larger size marked; both are positive."""
    larger = now_bytes + more_bytes
    low, high = (math.log(max(1, most(now_bytes, larger, *(size for size, _ in curve)))) for most in (min, max))
    span, top = max(high - low, 1e-6), max(hit_share(curve, math.inf), 0.01)

    def x(size: float) -> float:
        return round(LEFT + (math.log(max(size, 1)) - low) / span * (RIGHT - LEFT), 1)

    def y(share: float) -> float:
        return round(BOTTOM - share / top * (BOTTOM - TOP), 1)

    body = [
        _svg_text(LEFT, 18, "Hit share over size (LRU, estimated from a sample)", 'font-weight="bold"'),
        _svg_text(LEFT, 34, capacity_advice(curve, now_bytes, more_bytes)),
        _svg_line(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}", "#333"),
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        share, size = part * top, math.exp(low + part * span)
        body.append(_svg_line(f"M{LEFT} {y(share)}H{RIGHT}", "#ddd"))
        body.append(_svg_text(LEFT - 4, y(share) + 4, f"{100 * share:.1f} %", 'text-anchor="end"'))
        body.append(_svg_text(x(size), BOTTOM + 14, size_text(size), 'text-anchor="middle"'))
    steps = "".join(f"H{x(size)}V{y(share)}" for size, share in curve)
    body.append(_svg_line(f"M{LEFT} {BOTTOM}{steps}H{RIGHT}", "#2a6fdb", 'stroke-width="1.5" class="curve"'))
    for at, text, colour in ((now_bytes, "now", "#333333"), (larger, f"+{size_text(more_bytes)}", "#d9822b")):
        anchor, shift = ("end", -4) if x(at) > WIDTH / 2 else ("start", 4)
        body.append(_svg_line(f"M{x(at)} {TOP}V{BOTTOM}", colour, 'stroke-dasharray="4 3"'))
        body.append(_svg_text(x(at) + shift, TOP + 10, text, f'text-anchor="{anchor}" fill="{colour}"'))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">{paper}', *body, "</svg>\n"])


def _svg_text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'


def _svg_line(path: str, colour: str, style: str = "") -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" {style}/>'


CALL_TIMEOUT_S = 10.0
PAUSE_S = 0.2
EXIT_FAULTY = 1
GB = 1e9
app = typer.Typer(
    name="moonpool kvstore", help="Inspect and maintain kvstores.", add_completion=False, context_settings=HELP
)
VERBS = ("stat", "verify", "compact", "warm", "advise", "add-key", "drop-keys")
Store = Annotated[str, typer.Argument(help="The kvstore, HOST:PORT.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def _store_stub(address: str) -> Iterator[KVStoreServiceStub]:
    """A stub; a gRPC error is raised as the status's `MoonpoolError`."""
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
    with _store_stub(address) as stub:
        gauges = _gauges(stub)
    if as_json:
        typer.echo(json.dumps(gauges))
        return
    table = RecordTable("figure", "value", right=("value",))
    for name, value in gauges.items():
        if value:
            is_size = name.removesuffix("_total").endswith("_bytes")
            table.add_row(name, size_text(value) if is_size else f"{value:,.3f}".rstrip("0").rstrip("."))
    hits, misses = gauges["dram_hits_total"] + gauges["ssd_hits_total"], gauges["misses_total"]
    if hits + misses:
        table.add_row("hit share", f"{hits / (hits + misses):.1%}")
    stdout_console().print(table)
    say(f"{sum(not value for value in gauges.values())} other figures are 0; --json lists them.", err=True)


@app.command()
def verify(
    data_dir: Annotated[Path, typer.Argument(help="Data folder of a kvstore that does not run.")],
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged, and write the index anew.")] = False,
    as_json: Json = False,
) -> None:
    """Check a data folder: each block against its checksums, the index against the blocks, and conductors' records.

    Changes nothing without --repair. Exits with 1 when a fault is found and not repaired. A kvstore would answer the
    faulty blocks with a miss, and repair the rest at startup.
    """
    from moonpool.kvstore import repair as folder

    with _progress("segments", hidden=as_json) as advance:
        report = folder.verify(data_dir, advance)
    repaired = repair and not report.ok
    if repaired:
        folder.repair(data_dir, report)
        with _progress("segments", hidden=as_json) as advance:
            left = folder.verify(data_dir, advance)
    ok = left.ok if repaired else report.ok
    if as_json:
        faults = [
            {"segment": f.segment, "offset": f.offset, "key": f.key.hex() if f.key else None, "what": f.what}
            for f in report.faults
        ]
        names = ("segments", "records", "blocks", "dead", "bytes_read", "index_error", "records_error")
        found = {name: getattr(report, name) for name in names}
        found |= {"faults": report.fault_count, "first": faults, "repaired": repaired and ok, "key_ids": report.key_ids}
        typer.echo(json.dumps(found))
        raise typer.Exit(0 if ok else EXIT_FAULTY)
    say(
        f"{report.segments} segments, {report.records} records, {report.blocks} intact blocks, "
        f"{report.dead} dead records, {size_text(report.bytes_read)} read"
    )
    for key_id, records in sorted(report.key_ids.items()):
        say(f"key {key_id} encrypts {records} blocks")
    if report.index_error:
        say(f"index: {report.index_error}")
    if report.records_error:
        say(f"conductors' records: {report.records_error}")
    for fault in report.faults:
        say(f"segment {fault.segment}, offset {fault.offset}: {fault.what}")
    if repaired:
        after = f"{left.blocks} intact blocks left" if ok else f"{left.fault_count} faults are left"
        say(f"repaired: {len(report.damaged)} damaged blocks dropped, index written anew; {after}")
    elif not ok:
        say(f"a start repairs this; without a start: moonpool kvstore verify --repair {data_dir}")
    raise typer.Exit(0 if ok else EXIT_FAULTY)


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
    with _store_stub(address) as stub:
        before = _gauges(stub)
        request = kvstore_pb2.CompactRequest(min_live_share=min_live_share)
        segments = stub.Compact(request, timeout=CALL_TIMEOUT_S).segments
        if segments and wait_s:
            _wait_until(lambda: not _gauges(stub)["ssd_housekeeping"], wait_s, "compaction has not finished")
        after = _gauges(stub)
    freed = before["ssd_bytes"] - after["ssd_bytes"]
    if as_json:
        typer.echo(json.dumps({"segments": segments, "freed_bytes": freed}))
    else:
        say(f"{segments} segments rewritten, {size_text(freed)} freed")


@app.command()
def warm(
    address: Store,
    max_bytes: Annotated[
        int, typer.Option(parser=size_option, metavar="SIZE", help="Bytes at most; 0 = as many as fit.")
    ] = 0,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Time limit, seconds.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Fill a kvstore's free DRAM from the SSD tier, the most recently written blocks first."""
    with _store_stub(address) as stub:
        warmed = stub.Warm(kvstore_pb2.WarmRequest(max_bytes=max_bytes), timeout=timeout_s)
    if as_json:
        typer.echo(json.dumps({"blocks": warmed.blocks, "bytes": warmed.bytes}))
    else:
        say(f"{warmed.blocks} blocks, {size_text(warmed.bytes)} now in DRAM")


@app.command()
def advise(
    address: Store,
    more_gb: Annotated[float, typer.Option(min=0.0, help="GB that would be added.")] = 100.0,
    picture: Annotated[Path | None, typer.Option(help="Draw the curve into this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate the hit share of a larger kvstore, from sampled reuse distances."""
    with _store_stub(address) as stub:
        told = stub.ReuseCurve(kvstore_pb2.ReuseCurveRequest(), timeout=CALL_TIMEOUT_S)

    curve = [(point.bytes, point.hit_share) for point in told.points]
    now_bytes, more_bytes = told.capacity_bytes, max(1, round(more_gb * GB))
    if picture is not None:
        picture.write_text(draw_hit_curve(curve, now_bytes, more_bytes), encoding="utf-8")
    if as_json:
        points = [{"bytes": nbytes, "hit_share": share} for nbytes, share in curve]
        facts = {"references": told.references, "sampled": told.sampled, "capacity_bytes": now_bytes}
        shares = {"now": hit_share(curve, now_bytes), "with_more": hit_share(curve, now_bytes + more_bytes)}
        typer.echo(json.dumps({**facts, **shares, "more_gb": more_gb, "points": points}))
    elif not curve:
        say("no block was asked for twice since this kvstore started")
    else:
        say(capacity_advice(curve, now_bytes, more_bytes))
        say(f"({told.references} blocks asked for, {told.sampled:.1%} of all blocks followed)")


KeyFile = Annotated[Path, typer.Argument(help="The file of `encryption_keys`.")]


@app.command("add-key")
def add_key(
    file: KeyFile,
    tenant: Annotated[str, typer.Option(help='Owner of the key; "*": tenants without keys of their own.')] = "*",
) -> None:
    """Put a new key before a tenant's others; makes the file. New blocks are encrypted with the new key."""
    from moonpool.kvstore.ssd import encryption

    say(f"new key of {tenant}: {encryption.add_key(file, tenant)}")


@app.command("drop-keys")
def drop_keys(file: KeyFile, tenant: Annotated[str, typer.Option(help="Owner of the keys.")]) -> None:
    """Remove a tenant's keys: what they encrypt can never be read again, and stores that use the file delete it."""
    from moonpool.kvstore.ssd import encryption

    say(f"{tenant} has no keys any more; removed: {', '.join(encryption.drop_keys(file, tenant))}")


@contextmanager
def _progress(what: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True) as progress:
        task = progress.add_task(what)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def _wait_until(done: Callable[[], bool], wait_s: float, what: str) -> None:
    """Wait until a condition holds; raise DeadlineExceeded if the time is over before."""
    deadline, pause = time.monotonic() + wait_s, threading.Event()
    while not done():
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"{what} after {wait_s:g} s")
        pause.wait(PAUSE_S)


def run_kvstore(args: list[str]) -> None:
    """Run `moonpool kvstore VERB ...`; errors are raised, for the caller to print."""
    with_pages(typer.main.get_command(app)).main(args, prog_name="moonpool kvstore")
