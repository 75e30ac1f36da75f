"""`moonpool state`, `top` and `explain`: the cluster according to the conductor, and why a request was placed."""

import dataclasses
import json
import sys
import threading
from collections.abc import Callable

import typer
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from moonpool.base.errors import MoonpoolError, NotFound
from moonpool.cli.tables import RecordTable, stdout_console
from moonpool.cli.whole_words import say
from moonpool.client import Client
from moonpool.client.cluster_state import ClusterState, EndedRequest, InstanceInfo, Quantiles, QueueInfo, RecentInfo
from moonpool.client.explain import PHASE_NAMES, Attempt, Candidate, RequestPhase, request_phases
from moonpool.client.types import Placement

TIMELINE_WIDTH = 40
"""Characters in a time line."""
INSTANCE_FIGURES = ("run", "wait", "tokens", "used", "cached", "promised")
"""Requests that run and wait, tokens that wait, and blocks: used, cached, promised to requests that come."""
CANDIDATE_FIGURES = ("own", "used", "queue", "load", "compute", "calls", "TTFT")
"""Prefix blocks in the instance's pool and used, and the parts of the predicted time to the first token."""


def run_state(client: Client, *, as_json: bool) -> None:
    """Print the model and every instance, as a table or as one JSON object."""
    state = client.cluster_state()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(state)))
        return
    say(headline(state))
    say(queue_line(state.queue))
    table = RecordTable("instance", "role", "address", *INSTANCE_FIGURES, "", right=INSTANCE_FIGURES)
    for instance in state.instances:
        used = instance.total_blocks - instance.free_blocks - instance.cached_blocks
        share = f"{used}/{instance.total_blocks}" if instance.total_blocks else "-"
        counts = (
            instance.running,
            instance.waiting,
            instance.queued_tokens,
            share,
            instance.cached_blocks,
            instance.promised_blocks,
        )
        table.add_row(
            instance.id, instance.role, instance.address, *map(str, counts), "draining" if instance.draining else ""
        )
    console = stdout_console()
    console.print(table)
    if len(state.queue.tenants) > 1:
        console.print(_tenants(state.queue))


def queue_line(queue: QueueInfo) -> str:
    """Requests that wait at the conductor."""
    size = f" ({queue.prompt_bytes:,} bytes)" if queue.for_limits else ""
    return f"queued at the conductor: {queue.for_limits} for SLO{size}, {queue.for_room} for decode memory"


def _tenants(queue: QueueInfo) -> RecordTable:
    figures = ("weight", "requests", "waiting")
    table = RecordTable("tenant", *figures, right=figures, title="tenants at the conductor")
    for tenant in queue.tenants:
        table.add_row(tenant.tenant or "(none)", f"{tenant.weight:g}", str(tenant.requests), str(tenant.waiting))
    return table


def headline(state: ClusterState) -> str:
    """The conductor, and what is served."""
    if not state.model:
        return f"{state.conductor}: no engine has joined yet"
    emulated = f", compute emulated by {state.emulated}" if state.emulated else ""
    ready = "ready" if state.ready else "not ready"
    return (
        f"{state.conductor}: {ready}, serves {state.model} "
        f"({state.max_tokens:,} tokens, blocks of {state.block_size}{emulated})"
    )


def run_explain(client: Client, request_id: str, *, as_json: bool) -> None:
    """Print every prefill candidate with predicted parts, the choice, and the later measurements.

    Args:
        client: of the cluster.
        request_id: the request; "" = the newest that has ended.
        as_json: print a JSON object.

    Raises:
        NotFound: the conductor knows no such request, or has forgotten the request.
    """
    request_id = request_id or _newest_request(client)
    found = client.explain(request_id)
    if as_json:
        bars = [dataclasses.asdict(phase) for phase in request_phases(found)]
        typer.echo(json.dumps({"request_id": request_id, **dataclasses.asdict(found), "phases": bars}))
        return
    console = stdout_console()
    typer.echo(f"policy {found.policy}")
    typer.echo("prefixes in blocks, `SSD` of them read from SSD; times in seconds")
    for number, attempt in enumerate(found.attempts, 1):
        if len(found.attempts) > 1:
            cause = f", because {attempt.cause}" if attempt.cause else ""
            typer.echo(f"\nplacement {number}, at {attempt.placed_s:.4f} s{cause}")
        console.print(_candidate_table(attempt.candidates, attempt.placement.prefill))
        say(_attempt_text(attempt))
    if found.refused:
        console.print(_candidate_table(found.candidates, ""))
        say(f"refused: {found.refused}")
    if found.failed:
        say(f"failed: {found.failed}")
    if found.cancelled:
        typer.echo("cancelled: the client stopped the request, or left")
    typer.echo(f"TTFT {_seconds_text(found.measured_ttft_s)}, TPOT {_seconds_text(found.measured_tpot_s)}")
    for better, lost_s in ((found.better, found.regret_s), (found.better_decode, found.decode_regret_s)):
        if better:
            typer.echo(f"in hindsight {better} would have been {_seconds_text(lost_s)} sooner")
    if drawn := request_phases(found):
        console.print(_timeline(drawn))
        for name in dict.fromkeys(phase.name for phase in drawn):
            typer.echo(f"{name}: {PHASE_NAMES[name]}")


def _newest_request(client: Client) -> str:
    last = client.cluster_state().recent.last
    if not last:
        raise NotFound("no request has ended since the conductor started")
    return last[0].request_id


def _candidate_table(candidates: tuple[Candidate, ...], chosen: str) -> RecordTable:
    table = RecordTable("prefill", *CANDIDATE_FIGURES, "from", "SSD", "", right=(*CANDIDATE_FIGURES, "SSD"))
    for candidate in sorted(candidates, key=lambda candidate: (bool(candidate.excluded), _ttft_s(candidate))):
        parts = [candidate.queue_s, candidate.load_s, candidate.prefill_s, candidate.overhead_s, _ttft_s(candidate)]
        times = ["-"] * 5 if candidate.excluded else [f"{part:.4f}" for part in parts]
        remark = candidate.excluded or ("chosen" if candidate.instance == chosen else "")
        cold = str(candidate.cold_blocks or "")
        table.add_row(
            candidate.instance,
            str(candidate.local_blocks),
            str(candidate.used_blocks),
            *times,
            candidate.source,
            cold,
            remark,
        )
    return table


def _timeline(drawn: list[RequestPhase]) -> RecordTable:
    """The phases on one time line."""
    end_s = max(phase.end_s for phase in drawn) or 1.0
    figures = ("tokens", "from s", "for s")
    several = max(phase.attempt for phase in drawn) > 1
    table = RecordTable("phase", *figures, "", right=figures)
    for phase in drawn:
        begin, end = (round(TIMELINE_WIDTH * at / end_s) for at in (phase.begin_s, phase.end_s))
        bar = " " * min(begin, TIMELINE_WIDTH - 1) + "█" * max(1, end - begin)
        times = f"{phase.begin_s:.4f}", f"{phase.end_s - phase.begin_s:.4f}"
        name = f"{phase.attempt} {phase.name}" if several else phase.name
        table.add_row(name, str(phase.tokens or ""), *times, bar)
    return table


def _ttft_s(candidate: Candidate) -> float:
    return candidate.queue_s + candidate.load_s + candidate.prefill_s + candidate.overhead_s


def _attempt_text(attempt: Attempt) -> str:
    """Where a request was placed, what was computed there, and how the prediction fits."""
    placement = attempt.placement
    waited = f", after {attempt.waited_s:.4f} s without a place" if attempt.waited_s else ""
    over = f", KV over {attempt.transport}" if attempt.transport else ""
    came = attempt.first_token_s - attempt.placed_s if attempt.first_token_s else 0.0
    lines = [_placement_text(placement) + waited + over]
    if attempt.first_token_s:
        computed = attempt.prompt_tokens - attempt.local_tokens - attempt.loaded_tokens
        slow = f", {attempt.overtaken_tokens} of them while a slower load was under way"
        lines.append(
            f"{attempt.prompt_tokens} tokens to compute or find: {attempt.local_tokens} there already, "
            f"{attempt.loaded_tokens} loaded, {computed} computed{slow if attempt.overtaken_tokens else ''}; "
            f"{attempt.tokens} new tokens of the answer"
        )
    if attempt.rows_tokens:
        lines.append(f"encoded pictures ({attempt.rows_tokens} tokens) came from kvstores in {attempt.rows_s:.4f} s")
    if attempt.encode_s:
        lines.append(
            f"pictures took {attempt.encode_s:.4f} s of {attempt.prefill_s:.4f} s that the prompt was computed"
        )
    lines.append(
        f"first token: predicted {placement.predicted_ttft_s:.4f} s, came {_seconds_text(came)} after the placement; "
        f"TPOT predicted {_seconds_text(placement.predicted_tpot_s)}"
    )
    if attempt.ended_s:
        lines.append(f"given up at {attempt.ended_s:.4f} s")
    return "\n".join(lines)


def _placement_text(placement: Placement) -> str:
    if placement.prefill == placement.decode:
        return f"placed on {placement.decode} alone, which computes what it does not hold of the prompt"
    source = f", prefix from {placement.kvstore}" if placement.kvstore else ""
    return f"placed on {placement.prefill}, then {placement.decode or 'nowhere: one token was all'}{source}"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.4f} s" if seconds else "-"


BAR_WIDTH = 16
SHOWN_REQUESTS = 8
"""Requests that are listed."""


def state_figures(state: ClusterState) -> dict[str, object]:
    """The cluster's state and the figures that follow, ready for JSON.

    `hit_rate` is the cached share of the last minute's prompt tokens, None without any.
    """
    recent = state.recent
    window_s = recent.window_s or 1.0
    prompts = recent.usage.prompt_tokens
    return {
        **dataclasses.asdict(state),
        "hit_rate": recent.usage.cached_tokens / prompts if prompts else None,
        "requests_per_s": recent.requests / window_s,
        "tokens_per_s": recent.usage.completion_tokens / window_s,
    }


def run_top(client: Client, *, interval_s: float, once: bool, as_json: bool) -> None:
    """Show the cluster again and again until Ctrl-C, or once.

    Args:
        client: the conductor's client.
        interval_s: seconds between two looks.
        once: look once; so does whoever pipes the text elsewhere.
        as_json: print a JSON object a line instead of drawing.

    Raises:
        MoonpoolError: the conductor does not answer. Where the cluster is drawn, only the first time.
    """
    pause = threading.Event()
    try:
        if as_json or once or not sys.stdout.isatty():
            _print_until_stopped(client, interval_s, pause, once=once, as_json=as_json)
        else:
            _draw_live(client, interval_s, pause)
    except KeyboardInterrupt:
        return


def _print_until_stopped(
    client: Client, interval_s: float, pause: threading.Event, *, once: bool, as_json: bool
) -> None:
    show: Callable[[ClusterState], None] = (
        _print_state_json if as_json else lambda state: stdout_console().print(render_cluster(state))
    )
    show(client.cluster_state())
    while not once and as_json:
        pause.wait(interval_s)
        show(client.cluster_state())


def _print_state_json(state: ClusterState) -> None:
    print(json.dumps(state_figures(state)), flush=True)


def _draw_live(client: Client, interval_s: float, pause: threading.Event) -> None:
    with Live(render_cluster(client.cluster_state()), auto_refresh=False, screen=True) as live:
        while True:
            pause.wait(interval_s)
            try:
                live.update(render_cluster(client.cluster_state()), refresh=True)
            except MoonpoolError as error:
                live.update(Text(f"{error}\nasking again every {interval_s:g} s; Ctrl-C ends"), refresh=True)


def render_cluster(state: ClusterState) -> RenderableType:
    """The cluster: figures of the last minute, instances and what they hold, the last requests."""
    lines = (headline(state), queue_line(state.queue), recent_line(state.recent))
    parts: list[RenderableType] = [Text(line) for line in lines]
    figures = ("run", "wait", "tokens", "used")
    table = RecordTable("instance", "role", *figures, "of", "tier", "", "state", right=(*figures, "of"))
    for instance in state.instances:
        for row in _instance_rows(instance):
            table.add_row(*row)
    parts.append(table)
    if state.recent.last:
        parts.append(_request_table(state.recent.last[:SHOWN_REQUESTS]))
    return Group(*parts)


def recent_line(recent: RecentInfo) -> str:
    """What was answered in the last minute."""
    if not recent.requests:
        return "no request was answered in the last minute"
    usage = recent.usage
    return (
        f"last {recent.window_s:.0f} s: {recent.requests} answered, TTFT {_quantiles_text(recent.ttft_s)}, "
        f"TPOT {_quantiles_text(recent.tpot_s)}, "
        f"{usage.cached_tokens / max(1, usage.prompt_tokens):.0%} of prompt tokens from the cache, "
        f"{usage.completion_tokens / max(recent.window_s, 1e-9):.1f} tokens/s"
    )


def _quantiles_text(found: Quantiles) -> str:
    return f"p50 {1e3 * found.p50:.0f} ms, p99 {1e3 * found.p99:.0f} ms" if found.p99 else "-"


def _instance_rows(instance: InstanceInfo) -> list[tuple[str, ...]]:
    """A row for each tier: an engine's pool, or a store's tiers."""
    tiers = [(tier.name, tier.used_bytes, tier.capacity_bytes, decimal(tier.capacity_bytes)) for tier in instance.tiers]
    if instance.total_blocks:
        tiers.append(
            (
                "pool",
                instance.total_blocks - instance.free_blocks,
                instance.total_blocks,
                f"{instance.total_blocks} blocks",
            )
        )
    load = (str(instance.running), str(instance.waiting), str(instance.queued_tokens))
    loads = [load, *[("", "", "")] * (len(tiers) - 1)]
    state = "draining" if instance.draining else ""
    return [
        (instance.id, instance.role, *counts, f"{used / max(1, total):.0%}", size, kind, bar(used, total), state)
        for counts, (kind, used, total, size) in zip(loads, tiers, strict=False)
    ] or [(instance.id, instance.role, *load, "", "", "", "", state)]


def bar(used: float, total: float) -> str:
    """A bar of `BAR_WIDTH` characters; a small value is never drawn as empty."""
    filled = min(BAR_WIDTH, round(BAR_WIDTH * used / total)) if total else 0
    filled = max(filled, 1) if used else filled
    return "█" * filled + "░" * (BAR_WIDTH - filled)


def _request_table(last: tuple[EndedRequest, ...]) -> RecordTable:
    figures = ("prompt", "cached", "answer", "TTFT ms", "TPOT ms")
    table = RecordTable("request", "tenant", *figures, "", right=figures, title="\nrecent requests")
    for request in last:
        usage, timing = request.usage, request.timing
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        times = (f"{1e3 * timing.ttft_s:.0f}", f"{1e3 * timing.tpot_s:.1f}")
        refused, failed = (
            request.refused and f"refused: {request.refused}",
            request.failed and f"failed: {request.failed}",
        )
        end = refused or failed or ("cancelled" if request.cancelled else "")
        table.add_row(request.request_id, request.tenant or "-", *map(str, counts), *times, end)
    return table
