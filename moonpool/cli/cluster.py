"""`moonpool state` and `moonpool explain`: the cluster as its conductor sees it, and why a request was placed so."""

import dataclasses
import json

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.client import Client
from moonpool.client.phases import NAMES, Phase, phases
from moonpool.client.types import Candidate, ClusterState, Explanation, InstanceInfo, Placement, QueueInfo

TIMELINE = 40
"""Characters of a line of time."""


def run_state(client: Client, *, as_json: bool) -> None:
    """Prints the model and every instance, as a table or as one JSON object."""
    state = client.cluster_state()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(state)))
        return
    typer.echo(headline(state))
    typer.echo(queue_line(state.queue))
    table = Table("instance", "kind", "address", "running", "waiting", "blocks used", "cached", "promised", "state")
    for column in table.columns[3:8]:
        column.justify = "right"
    for each in state.instances:
        used = each.total_blocks - each.free_blocks - each.cached_blocks
        share = f"{used:,} of {each.total_blocks:,}" if each.total_blocks else "-"
        counts = (str(each.running), waiting(each), share, f"{each.cached_blocks:,}", f"{each.promised_blocks:,}")
        table.add_row(each.id, each.kind, each.address, *counts, "draining" if each.draining else "")
    Console().print(table)
    if len(state.queue.tenants) > 1:
        Console().print(_tenants(state.queue))


def queue_line(queue: QueueInfo) -> str:
    """Who waits at the conductor."""
    size = f" ({queue.prompt_bytes:,} bytes)" if queue.for_limits else ""
    return (
        f"waiting at the conductor: {queue.for_limits} to keep their limits{size}, {queue.for_room} for room at decode"
    )


def _tenants(queue: QueueInfo) -> Table:
    table = Table("tenant", "weight", "requests", "waiting at the conductor")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in queue.tenants:
        table.add_row(escape(each.tenant) or "(none)", f"{each.weight:g}", str(each.requests), str(each.waiting))
    return table


def headline(state: ClusterState) -> str:
    """The conductor, and what is served."""
    if not state.model:
        return f"{state.conductor}: no engine has joined yet"
    emulated = f", compute emulated by {state.emulated}" if state.emulated else ""
    ready = "ready" if state.ready else "not ready"
    return (
        f"{state.conductor}: {ready}, serves {state.model} "
        f"({state.max_tokens:,} tokens, blocks of {state.block_tokens}{emulated})"
    )


def waiting(instance: InstanceInfo) -> str:
    """What waits at an instance."""
    queued = f" ({instance.queued_tokens:,} tokens)" if instance.queued_tokens else ""
    return f"{instance.waiting}{queued}"


def run_explain(client: Client, request_id: str, *, as_json: bool) -> None:
    """Prints every prefill candidate with its predicted parts, the choice, and what was measured then.

    Raises:
        NotFound: the conductor knows no such request, or has forgotten it.
    """
    found = client.explain(request_id)
    if as_json:
        bars = [dataclasses.asdict(phase) for phase in phases(found)]
        typer.echo(json.dumps({"request_id": request_id, **dataclasses.asdict(found), "phases": bars}))
        return
    typer.echo(f"policy {found.policy}")
    chosen = found.placement.prefill if found.placement is not None else ""
    table = Table(
        "prefill", "own prefix", "used prefix", "queue s", "load s", "compute s", "calls s", "TTFT s", "from", ""
    )
    for column in table.columns[1:8]:
        column.justify = "right"
    for each in sorted(found.candidates, key=lambda candidate: (bool(candidate.excluded), _ttft_s(candidate))):
        parts = [each.queue_s, each.load_s, each.prefill_s, each.overhead_s, _ttft_s(each)]
        times = ["-"] * 5 if each.excluded else [f"{part:.4f}" for part in parts]
        remark = each.excluded or ("chosen" if each.instance == chosen else "")
        source = f"{each.source} ({each.cold_blocks} on SSD)" if each.cold_blocks else each.source
        table.add_row(each.instance, str(each.local_blocks), str(each.used_blocks), *times, source, remark)
    Console().print(table)
    typer.echo(_outcome(found))
    if drawn := phases(found):
        Console().print(_timeline(drawn))


def _timeline(drawn: list[Phase]) -> Table:
    """The phases on one line of time."""
    end_s = max(phase.end_s for phase in drawn) or 1.0
    table = Table("phase", "tokens", "from s", "for s", "")
    for column in table.columns[1:4]:
        column.justify = "right"
    for phase in drawn:
        begin, end = (round(TIMELINE * at / end_s) for at in (phase.begin_s, phase.end_s))
        bar = " " * min(begin, TIMELINE - 1) + "█" * max(1, end - begin)
        times = f"{phase.begin_s:.4f}", f"{phase.end_s - phase.begin_s:.4f}"
        table.add_row(NAMES[phase.name], str(phase.tokens or ""), *times, bar)
    return table


def _ttft_s(candidate: Candidate) -> float:
    return candidate.queue_s + candidate.load_s + candidate.prefill_s + candidate.overhead_s


def _outcome(found: Explanation) -> str:
    if found.placement is None:
        return f"refused: {found.refused}"
    placement = found.placement
    waited = f", after {found.waited_s:.4f} s without a place" if found.waited_s else ""
    return "\n".join(
        (
            _where(placement) + waited + (f", KV over the lane {found.lane}" if found.lane else ""),
            f"TTFT: predicted {placement.predicted_ttft_s:.4f} s, measured {_measured(found.measured_ttft_s)}",
            f"TPOT: predicted {_measured(placement.predicted_tpot_s)}, measured {_measured(found.measured_tpot_s)}",
        )
    )


def _where(placement: Placement) -> str:
    if placement.prefill == placement.decode:
        return f"placed on {placement.decode} alone, which computes what it does not hold of the prompt"
    source = f", prefix from {placement.kvstore}" if placement.kvstore else ""
    return f"placed on {placement.prefill}, then {placement.decode or 'nowhere: one token was all'}{source}"


def _measured(seconds: float) -> str:
    return f"{seconds:.4f} s" if seconds else "-"
