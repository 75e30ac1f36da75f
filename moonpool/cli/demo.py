"""`moonpool demo`: serve one long prompt twice, then others, and show what the KV pool does."""

import asyncio
import contextlib
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from moonpool.base.checkpoint import Tokenizer, resolve
from moonpool.base.checkpoint.named_models import BUNDLED
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import wait_at_rest
from moonpool.cli.engine_plan import decide_engines
from moonpool.cli.options import Engines
from moonpool.cli.serve import started_stack
from moonpool.cli.stack import StackPlan
from moonpool.cli.tables import RecordTable
from moonpool.client import AsyncClient, Client, GenerateArguments, GenerateResult, Message

WIDTH = 80
BAR_WIDTH = 44
"""Columns of the longer bar."""
DOCUMENT_CHARACTERS = 9000
REST_S = 20.0


@dataclass(frozen=True, slots=True)
class DemoPrompts:
    """What the demonstration asks.

    Attributes:
        document: a long text, and a question about the text.
        follow_up: the next question, or the text that goes on.
        others: short prompts, asked at once.
        chat: prompts are a user's turns; otherwise the model continues them.
        sampling: of all answers.
    """

    document: str
    follow_up: str
    others: Sequence[str]
    chat: bool
    sampling: SamplingParams

    def first(self) -> GenerateArguments:
        """The long prompt."""
        return self._asked(self.document)

    def second_turn(self, answer: str) -> GenerateArguments:
        """The long prompt, its answer, and what follows."""
        if not self.chat:
            return {"prompt": self.document + answer + self.follow_up, "sampling": self.sampling}
        turns: list[Message] = [
            {"role": "user", "content": self.document},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": self.follow_up},
        ]
        return {"messages": turns, "sampling": self.sampling}

    def short(self) -> list[GenerateArguments]:
        """The short prompts."""
        return [self._asked(text) for text in self.others]

    def _asked(self, text: str) -> GenerateArguments:
        if self.chat:
            return {"messages": [{"role": "user", "content": text}], "sampling": self.sampling}
        return {"prompt": text, "sampling": self.sampling}


def demo_prompts(*, chat: bool, max_tokens: int) -> DemoPrompts:
    """Prompts for a model that chats, or for one that continues Python code."""
    document = _document()
    # The seed makes the same prompt give the same text; models this small repeat themselves.
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.2, top_p=0.9, seed=7)
    if chat:
        question = "Here is a Python module.\n\n" + document + "\n\nWhat is the module for? Answer in two sentences."
        subjects = ("the moon", "tides", "bread", "a library", "winter", "a train", "chess", "rain")
        others = [f"Write one sentence about {each}." for each in subjects]
        return DemoPrompts(question, "Name one of its functions.", others, True, sampling)
    names = ("read_file", "parse_date", "open_socket", "sort_items", "walk_tree", "count_words", "start_thread", "log")
    begun = [f"import os\nimport sys\n\n\ndef {name}(" for name in names]
    code = replace(sampling, temperature=0.6, repetition_penalty=1.25)
    return DemoPrompts(document, "\n\n\ndef test_", begun, False, code)


def _document() -> str:
    """Some thousand tokens of text that every machine has: a standard module's source."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    return source[:DOCUMENT_CHARACTERS].rsplit("\n", 1)[0] + "\n"


def run_demo(model: str, name: str, max_tokens: int, instead: str, engines: Engines) -> int:
    """Serve the demonstration's prompts; print a table, and the picture of a cold prompt beside a cached one.

    Args:
        model: folder or file to serve.
        name: the model as a user types it.
        max_tokens: most tokens per answer.
        instead: why another model is served than was meant; "" if the meant one is.
        engines: as `StackPlan.engines`.

    Returns:
        0 when everything was served and everything reserved came back.
    """
    console = Console(width=min(Console().width, WIDTH), highlight=False, markup=False, emoji=False)
    # The bundled model has a chat template and has seen code only.
    chats = name != BUNDLED and bool(Tokenizer.load(resolve(model)).chat_template)
    prompts = demo_prompts(chat=chats, max_tokens=max_tokens)
    with tempfile.TemporaryDirectory(prefix="moonpool-demo-") as folder:
        plan, _ = decide_engines(StackPlan(model=model, data_dir=Path(folder), engines=engines), one_client=True)
        if instead:
            console.print(f"{instead}\nServing the bundled model in its place.")
        console.print(f"Starting a stack with {name} ...")
        with contextlib.ExitStack() as running:
            stack = running.enter_context(started_stack(plan, lambda service: None))
            rows = _serve_demo(stack.address, prompts, console)
            wait_at_rest(stack.address, timeout_s=REST_S)
            statuses = stack.stop()
    console.print()
    console.print(demo_table(rows))
    console.print(picture(rows[0][1], rows[1][1]))
    console.print(next_steps(name), soft_wrap=True, highlight=False)
    return 0 if all(status == 0 for status in statuses.values()) else 1


Row = tuple[str, GenerateResult]
"""What was asked, and the answer."""


def _serve_demo(address: str, prompts: DemoPrompts, console: Console) -> list[Row]:
    rows: list[Row] = []
    with Client(address) as client:
        for what in ("a long prompt, cold", "the same again"):
            rows.append((what, client.generate(**prompts.first())))
            console.print(f"  served: {what}")
            wait_at_rest(address, timeout_s=REST_S)
        second = prompts.second_turn(rows[0][1].text)
        rows.append(("second turn", client.generate(**second)))
        console.print("  served: second turn of the conversation")
    results = asyncio.run(_serve_together(address, prompts.short()))
    console.print(f"  served: {len(results)} at once")
    return rows + [(f"{number} of {len(results)} at once", result) for number, result in enumerate(results, 1)]


async def _serve_together(address: str, asked: Sequence[GenerateArguments]) -> list[GenerateResult]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(client.generate(**each) for each in asked))


def demo_table(rows: Sequence[Row]) -> RecordTable:
    """A row for each request: tokens, and times in milliseconds."""
    figures = ("prompt", "cached", "answer", "TTFT ms", "tokens/s")
    table = RecordTable("request", *figures, right=figures)
    for what, result in rows:
        usage, timing = result.usage, result.timing
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        speed = f"{1 / timing.tpot_s:.1f}" if timing.tpot_s else "-"
        table.add_row(what, *map(str, counts), f"{1e3 * timing.ttft_s:.0f}", speed)
    return table


def picture(cold: GenerateResult, cached: GenerateResult) -> str:
    """Two bars: the time to the first token of a prompt that is new, and of the same prompt from the KV pool."""
    longest = max(cold.timing.ttft_s, cached.timing.ttft_s)
    lines = ["", "Time to the first token of the long prompt:", ""]
    for label, result in (("the first time", cold), ("the same again", cached)):
        seconds = result.timing.ttft_s
        bar = "█" * max(1, round(BAR_WIDTH * seconds / longest))
        lines.append(
            f"  {label}  {bar} {seconds:.2f} s" if seconds >= 0.1 else f"  {label}  {bar} {1e3 * seconds:.0f} ms"
        )
    usage = cached.usage
    lines += [
        "",
        f"{cold.timing.ttft_s / cached.timing.ttft_s:.1f} times sooner: {usage.cached_tokens:,} of "
        f"{usage.prompt_tokens:,} prompt tokens were in the KV pool.",
        "Everything reserved came back; all services have stopped.",
    ]
    return "\n".join(lines)


def next_steps(name: str) -> str:
    """What to do next, with the same model; `name` is the model as a user types it."""
    command = "moonpool" if shutil.which("moonpool") else sys.argv[0]
    if not command.endswith("moonpool"):
        command = "python -m moonpool.cli.main"
    return (
        f"\nNext:\n  {command} run {name}\n      chats here"
        f"\n  {command} serve {name}\n      has the page http://127.0.0.1:8000/"
    )
