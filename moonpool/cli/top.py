"""`moonpool top`: the cluster as the gateway's page draws it, in a terminal."""

import dataclasses
import json
import sys
import threading
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from moonpool.cli.cluster import headline, queue_line, waiting
from moonpool.client import Client
from moonpool.client.types import ClusterState, EndedRequest, InstanceInfo, Quantiles, RecentInfo
from moonpool.errors import MoonpoolError

BAR = 24
SHOWN = 8
"""Requests that are listed."""


def figures(state: ClusterState) -> dict[str, object]:
    """The cluster's state with what follows from it, as JSON is made of it.

    `hit_rate` is the cached share of prompt tokens of the last minute, None without any.
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
    """Shows the cluster again and again until Ctrl-C, or once.

    Args:
        client: of the conductor.
        interval_s: seconds between two looks.
        once: look once.
        as_json: print a JSON object a line instead of drawing.

    Raises:
        MoonpoolError: the conductor does not answer. Where the cluster is drawn, only the first time.
    """
    pause = threading.Event()
    try:
        if as_json or once or not sys.stdout.isatty():
            _print(client, interval_s, pause, once=once, as_json=as_json)
        else:
            _draw(client, interval_s, pause)
    except KeyboardInterrupt:
        return


def _print(client: Client, interval_s: float, pause: threading.Event, *, once: bool, as_json: bool) -> None:
    show: Callable[[ClusterState], None] = _print_json if as_json else lambda state: Console().print(picture(state))
    show(client.cluster_state())
    while not once:
        pause.wait(interval_s)
        show(client.cluster_state())


def _print_json(state: ClusterState) -> None:
    print(json.dumps(figures(state)), flush=True)


def _draw(client: Client, interval_s: float, pause: threading.Event) -> None:
    with Live(picture(client.cluster_state()), auto_refresh=False, screen=True) as live:
        while True:
            pause.wait(interval_s)
            try:
                live.update(picture(client.cluster_state()), refresh=True)
            except MoonpoolError as error:
                live.update(Text(f"{error}\nasking again every {interval_s:g} s; Ctrl-C ends"), refresh=True)


def picture(state: ClusterState) -> RenderableType:
    """The cluster: figures of the last minute, instances and what they hold, the last requests."""
    parts: list[RenderableType] = [headline(state), queue_line(state.queue), recent_line(state.recent)]
    table = Table("instance", "running", "waiting", "KV", "", expand=False)
    for each in state.instances:
        for row in _rows(each):
            table.add_row(*row)
    parts.append(table)
    if state.recent.last:
        parts.append(_requests(state.recent.last[:SHOWN]))
    return Group(*parts)


def recent_line(recent: RecentInfo) -> str:
    """What was answered in the last minute."""
    if not recent.requests:
        return "nothing was answered in the last minute"
    usage = recent.usage
    return (
        f"last {recent.window_s:.0f} s: {recent.requests} answered, TTFT {_quantiles(recent.ttft_s)}, "
        f"TPOT {_quantiles(recent.tpot_s)}, {usage.cached_tokens / max(1, usage.prompt_tokens):.0%} of prompt tokens "
        f"from the cache, {usage.completion_tokens / max(recent.window_s, 1e-9):.1f} tokens/s"
    )


def _quantiles(found: Quantiles) -> str:
    return f"p50 {1e3 * found.p50:.0f} ms, p99 {1e3 * found.p99:.0f} ms" if found.p99 else "-"


def _rows(each: InstanceInfo) -> list[tuple[str, ...]]:
    """A row for each tier of an instance: its pool, or a store's."""
    name = f"{each.id} (draining)" if each.draining else each.id
    tiers = [(tier.name, tier.used_bytes, tier.capacity_bytes, decimal(tier.capacity_bytes)) for tier in each.tiers]
    if each.total_blocks:
        tiers.append(("pool", each.total_blocks - each.free_blocks, each.total_blocks, f"{each.total_blocks:,} blocks"))
    first = (name, str(each.running), waiting(each))
    heads = [first, *[("", "", "")] * (len(tiers) - 1)]
    return [
        (*head, bar(used, total), f"{kind} {used / max(1, total):.0%} of {size}")
        for head, (kind, used, total, size) in zip(heads, tiers, strict=False)
    ] or [(*first, "", "")]


def bar(used: float, total: float) -> str:
    """A bar of `BAR` characters; something is never drawn as nothing."""
    filled = min(BAR, round(BAR * used / total)) if total else 0
    filled = max(filled, 1) if used else filled
    return "█" * filled + "░" * (BAR - filled)


def _requests(last: tuple[EndedRequest, ...]) -> Table:
    table = Table("request", "tenant", "prompt", "cached", "answer", "TTFT ms", "TPOT ms", title="recent requests")
    for column in table.columns[2:]:
        column.justify = "right"
    for each in last:
        usage, timing = each.usage, each.timing
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        times = (f"{1e3 * timing.ttft_s:.0f}", f"{1e3 * timing.tpot_s:.1f}")
        table.add_row(escape(each.request_id), escape(each.tenant) or "-", *map(str, counts), *times)
    return table
