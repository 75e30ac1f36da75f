"""`moonpool demo` (`make run`): starts a local stack, serves prompts that show KV reuse, and stops it."""

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from moonpool.cli.check import wait_at_rest
from moonpool.cli.loading import loading_bars
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, Client, GenerateResult, SamplingParams

CUT = 48
TABLE_WIDTH = 160
LONG_PROMPT_CHARACTERS = 9000


@dataclass(frozen=True, slots=True)
class Shown:
    """One row of the table."""

    what: str
    result: GenerateResult


def run_demo(model: str, max_tokens: int, instead: str) -> int:
    """Serves the demonstration's prompts and prints a table.

    Args:
        model: folder or file to serve.
        max_tokens: of each answer at most.
        instead: why it is not the model that was meant to be served; "" when it is.

    Returns:
        0 when everything was served and everything reserved came back.
    """
    console = Console(width=max(Console().width, TABLE_WIDTH), highlight=False)
    with tempfile.TemporaryDirectory(prefix="moonpool-demo-") as folder:
        plan = StackPlan(model=model, data_dir=Path(folder))
        if instead:
            console.print(f"{instead}\nServing the bundled model in its place.", markup=False)
        console.print(f"Starting conductor, kvstore, prefill and decode with [bold]{Path(model).name}[/] ...")
        with contextlib.ExitStack() as running:
            with loading_bars(console) as on_loading:
                told = lambda service: console.print(f"  {service.id:<10} {service.address}")  # noqa: E731
                stack = running.enter_context(LocalStack(plan, on_ready=told, on_loading=on_loading))
            console.print(f"ready: {stack.address}")
            rows = _serve(stack.address, max_tokens, console)
            wait_at_rest(stack.address, timeout_s=20)
            statuses = stack.stop()
    console.print(_table(rows))
    cold, cached = rows[0].result, rows[1].result
    ratio = cold.timing.ttft_s / cached.timing.ttft_s
    console.print(
        f"TTFT cold {1e3 * cold.timing.ttft_s:.0f} ms, cached {1e3 * cached.timing.ttft_s:.0f} ms: "
        f"[bold]{ratio:.1f} times sooner[/], as {cached.usage.cached_tokens} of {cached.usage.prompt_tokens} "
        "prompt tokens were in the KV pool."
    )
    console.print("Everything reserved came back; all services have stopped.")
    console.print("Next: `make chat` chats; `.venv/bin/moonpool up` keeps a stack running, for prompts of your own:")
    console.print(
        "`.venv/bin/moonpool generate --prompt 'def main('`. --model takes a folder, a GGUF file or a hub id."
    )
    return 0 if all(status == 0 for status in statuses.values()) else 1


def _serve(address: str, max_tokens: int, console: Console) -> list[Shown]:
    # A model this small repeats itself when greedy; the seed makes the same prompt give the same text all the same.
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.6, top_p=0.9, repetition_penalty=1.25, seed=7)
    long_prompt = _long_prompt()
    rows: list[Shown] = []
    with Client(address) as client:
        for what, prompt in (("a long prompt, cold", long_prompt), ("the same again", long_prompt)):
            rows.append(Shown(what, client.generate(prompt=prompt, sampling=sampling)))
            console.print(f"  served: {what}")
            wait_at_rest(address, timeout_s=20)
        second_turn = long_prompt + rows[0].result.text + "\n\n\ndef test_"
        rows.append(Shown("second turn of conversation", client.generate(prompt=second_turn, sampling=sampling)))
        console.print("  served: second turn of conversation")
    results = asyncio.run(_at_once(address, sampling))
    console.print(f"  served: {len(results)} at once")
    return rows + [Shown(f"{number} of {len(results)} at once", result) for number, result in enumerate(results, 1)]


async def _at_once(address: str, sampling: SamplingParams) -> list[GenerateResult]:
    names = ("read_file", "parse_date", "open_socket", "sort_items", "walk_tree", "count_words", "start_thread", "log")
    prompts = [f"import os\nimport sys\n\n\ndef {name}(" for name in names]
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(client.generate(prompt=prompt, sampling=sampling) for prompt in prompts))


def _long_prompt() -> str:
    """Some thousand tokens of text that every machine has: the source of a standard module."""
    import textwrap

    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    return source[:LONG_PROMPT_CHARACTERS].rsplit("\n", 1)[0] + "\n"


def _table(rows: list[Shown]) -> Table:
    table = Table(title="What was served", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("request", "text"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for heading in ("prompt", "cached", "generated", "TTFT ms", "TPOT ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("prefill > decode", no_wrap=True)
    for row in rows:
        usage, timing, placement = row.result.usage, row.result.timing, row.result.placement
        text = " ".join(row.result.text.split())
        table.add_row(
            row.what,
            text if len(text) <= CUT else text[: CUT - 1] + "…",
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.completion_tokens),
            f"{1e3 * timing.ttft_s:.0f}",
            f"{1e3 * timing.tpot_s:.1f}",
            f"{placement.prefill} > {placement.decode or '-'}",
        )
    return table
