"""What a served model's clients see: time to the first token, time per token, and gaps as a long prompt joins."""

import asyncio
import math
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import load_config
from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.cli.check import wait_at_rest
from moonpool.client import AsyncClient
from tools.gpu_check.serving import (
    ENDING_S,
    Answer,
    CheckedStack,
    Prompts,
    Served,
    ask,
    checkpoint,
    first_error,
    gaps,
    gpu_memory_mib,
    greedy,
    plan_of,
    run_until,
    step_ends,
)
from tools.gpu_check.where import CheckError, Figures, Where, expect

AFTER_FIRST = 8
"""Tokens in an answer with a timed first token: a decode follows, as for users."""
START_TOGETHER = 16
"""So many more sequences make answers longer once more."""
CACHED = 0.9
LOUD = 3.0
"""A gap of so many times the time per token is told as a warning."""
REST_S = 20.0
LOOK_S = 1.0
"""Seconds for which a thread looks at gauges: the thread cannot be cancelled."""
OF_STEPS = " of steps"
NOT_TOLD = "skipped: decode has not told its steps"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked for. All lengths in tokens.

    Attributes:
        prompts: prompt lengths for measuring TTFT.
        rounds: measured prompts of each length.
        batches: concurrent sequences for measuring TPOT.
        short: prompts of sequences that run at once.
        answer: their answers.
        running: sequences that run while another joins.
        running_answer: answers of these at most; they are cancelled before.
        joining: prompt that joins.
    """

    prompts: tuple[int, ...] = (2048, 8192, 32768)
    rounds: int = 3
    batches: tuple[int, ...] = (1, 8, 64)
    short: int = 128
    answer: int = 128
    running: int = 32
    running_answer: int = 4096
    joining: int = 8192

    def answer_of(self, batch: int) -> int:
        """Return the tokens per answer in a batch: so many that the first still runs when the last starts."""
        return self.answer * (1 + batch // START_TOGETHER)


SIZES = Sizes()
LARGE_SIZES = Sizes(rounds=2, running_answer=1024)
TINY_SIZES = Sizes((64, 256), 1, (1, 4), 32, 16, 4, 1024, 256)


def serve(where: Where, served: Served, sizes: Sizes, figures: Figures) -> None:
    """Start a stack, measure the stack, and stop the stack.

    Raises:
        CheckError: a part failed, or a service did not end in order.
        Unavailable: a service did not start; the message has the end of the stage's log.
    """
    end = time.monotonic() + where.limit_s - ENDING_S
    model = checkpoint(where, served, figures)
    began = time.monotonic()
    spans = where.out / f"serve-{served.folder}-spans"
    plan = plan_of(where, served, model, f"serve-{served.folder}", {"decode": ("--set", f"spans_dir={spans}")})
    with CheckedStack(plan, end - began) as stack:
        figures["start, s"] = round(time.monotonic() - began, 1)
        figures["GPU memory at start, MiB"] = gpu_memory_mib(where)
        speeds = ClientSpeeds(stack, model, sizes, figures)
        run_until(end - time.monotonic(), speeds.measure(), lambda: speeds.doing)
        figures["GPU memory at the end, MiB"] = gpu_memory_mib(where)
    stack.expect_ended_in_order()
    speeds.tell_gaps_of_steps(step_ends(spans / "decode-0.jsonl"))


class ClientSpeeds:
    """Measures one stack. Figures get times in milliseconds, medians unless they say otherwise.

    Attributes:
        doing: what is measured now.
    """

    def __init__(self, stack: CheckedStack, model: Path, sizes: Sizes, figures: Figures) -> None:
        self._stack, self._sizes, self._figures = stack, sizes, figures
        self._prompts = Prompts(load_config(model).vocab_size)
        self._spans_of_time: list[tuple[str, float, float, float, float]] = []
        self.doing = ""

    async def measure(self) -> None:
        """Measure everything. A part that fails lets the next go on, while all services run.

        Raises:
            CheckError: parts failed; names all.
        """
        sizes, wrong = self._sizes, []
        *prompts, longest = sizes.prompts
        parts: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *(partial(self._tpot, batch) for batch in sizes.batches),
            *(partial(self._ttft, length) for length in prompts),
            self._joins,
            partial(self._ttft, longest),
        ]
        async with AsyncClient(self._stack.address) as client:
            await client.stats()  # the client is connected
            self._client = client
            for part in parts:
                try:
                    await part()
                except* (MoonpoolError, CheckError) as errors:
                    wrong.append(f"{self.doing}: {first_error(errors)}")
                    self._stack.expect_all_run(wrong[-1])
            self.doing = "writing KV back"
            await self._at_rest()  # so that services end soon
        expect(not wrong, "; ".join(wrong))

    # --- time to the first token -------------------------------------------------------------------------------------

    async def _ttft(self, length: int) -> None:
        """Measure prompts of a length.

        Raises:
            CheckError: KV that should have been reused was not.
        """
        self.doing = f"TTFT of {length} tokens"
        first = await self._prompt(length)
        self._figures[f"TTFT {length} first, ms"] = round(first.ttft_ms, 2)
        cold, cached, written, by = [], [], [], set()
        kept = int(length * CACHED)
        for _ in range(self._sizes.rounds):
            written.append(await self._at_rest())
            fresh = self._prompts(length)
            cold.append(await self._ask(fresh, AFTER_FIRST))
            written.append(await self._at_rest())
            cached.append(await self._ask(fresh[:kept] + self._prompts(length - kept), AFTER_FIRST))
            by.add(cached[-1].placed)
        ttft_ms = statistics.median(turn.ttft_ms for turn in cold)
        self._figures[f"TTFT {length} cold, ms"] = round(ttft_ms, 2)
        self._figures[f"prefill {length}, tokens/s"] = round(1e3 * length / ttft_ms)
        self._figures[f"TTFT {length} 90 % cached, ms"] = round(statistics.median(turn.ttft_ms for turn in cached), 2)
        reused, block = min(turn.cached for turn in cached), self._stack.plan.block_size
        self._figures[f"reused of {length} 90 % cached, tokens"] = reused
        for name, turns in (("cold", cold), ("90 % cached", cached)):
            self._figures[f"TTFT {length} {name}, in parts"] = parts_of_ttft(turns)
        self._figures[f"at rest after {length}, ms at most"] = round(1e3 * max(written), 1)
        print(f"{self.doing}: cold {_list(cold)}; cached {_list(cached)}, by {', '.join(sorted(by))}", file=sys.stderr)
        expect(reused >= kept // block * block, f"only {reused} tokens were reused of {kept} of which KV was there")

    async def _prompt(self, length: int) -> Answer:
        return await self._ask(self._prompts(length), AFTER_FIRST)

    async def _ask(self, prompt: Sequence[int], tokens: int, answer: Answer | None = None) -> Answer:
        return await ask(self._client, prompt, greedy(tokens), answer)

    async def _at_rest(self) -> float:
        """Wait until all KV is written to the kvstore, for some time; return the seconds that this took."""
        clock = asyncio.get_running_loop().time
        began, held = clock(), "not looked at"
        while held and clock() - began < REST_S:
            try:
                await asyncio.to_thread(wait_at_rest, self._stack.address, LOOK_S)
                held = ""
            except Unavailable as error:
                held = str(error)
        if held:  # `load` fails for that
            print(f"{self.doing}: {held}", file=sys.stderr)
        return clock() - began

    # --- time per token ----------------------------------------------------------------------------------------------

    async def _tpot(self, batch: int) -> None:
        """Measure so many sequences at once; the first time apart, which may compile and capture."""
        for name in (f"batch {batch}, first time", f"batch {batch}"):
            self.doing = f"TPOT of {name}"
            tokens = self._sizes.answer_of(batch)
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._ask(self._prompts(self._sizes.short), tokens)) for _ in range(batch)]
            answers = [turn.result() for turn in asked]
            begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
            if begin >= end:  # on a busy CPU short answers end before the last one begins
                self._figures[f"TPOT {name}, ms"] = f"skipped: {batch} sequences never ran at once"
                continue
            self._figures[f"TPOT {name}, ms"] = round(1e3 * _tpot_s(answers, begin, end), 3)
            self._gaps(f"{{}} gap{{}} {name}, ms", answers, begin, end)
            came = sum(answer.tokens_between(begin, end) for answer in answers)
            self._figures[f"{name}, tokens/s"] = round(came / (end - begin))

    # --- a long prompt joins -----------------------------------------------------------------------------------------

    async def _joins(self) -> None:
        """Let long prompts join running sequences: a computed prompt, and a prompt nearly cached at prefill."""
        sizes = self._sizes
        answers = [Answer() for _ in range(sizes.running)]
        async with asyncio.TaskGroup() as group:
            self.doing = f"starting {sizes.running} sequences"
            tasks = [
                group.create_task(self._ask(self._prompts(sizes.short), sizes.running_answer, answer))
                for answer in answers
            ]
            for answer in answers:
                await answer.has(sizes.answer // 4)
            self.doing = f"a prompt of {sizes.joining} tokens joins"
            await self._join(f"{sizes.joining} joins {sizes.running}", answers, self._prompts(sizes.joining))
            self.doing = f"{self.doing}, cached"
            kept, prompt = int(sizes.joining * CACHED), self._prompts(sizes.joining)
            await self._ask(prompt, 1)  # decode takes no part, so all KV is new there
            joining = prompt[:kept] + self._prompts(sizes.joining - kept)
            await self._join(f"{sizes.joining} cached joins {sizes.running}", answers, joining)
            ended = sum(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
        expect(not ended, f"{ended} of {sizes.running} sequences ended before the prompt had joined")

    async def _join(self, name: str, running: Sequence[Answer], prompt: Sequence[int]) -> None:
        clock = asyncio.get_running_loop().time
        before = clock()
        await asyncio.sleep(0.3)
        joined = await self._ask(prompt, 2 * AFTER_FIRST)
        sent, first, end = joined.sent, joined.times[0], clock()
        tpot_s = _tpot_s(running, before, sent)
        self._figures[f"{name}: TPOT before, ms"] = round(1e3 * tpot_s, 3)
        self._gaps(f"{name}: {{}} gap{{}} before, ms", running, before, sent)
        self._figures[f"{name}: TTFT, ms"] = round(joined.ttft_ms, 2)
        self._figures[f"{name}: TPOT until its first token, ms"] = round(1e3 * _tpot_s(running, sent, first), 3)
        computed = self._gaps(f"{name}: {{}} gap{{}} until its first token, ms", running, sent, first)
        joins = self._gaps(f"{name}: {{}} gap{{}} after, ms", running, first, end)
        ratio = max(computed, joins) / tpot_s
        self._figures[f"{name}: longest gap, times TPOT"] = round(ratio, 2)
        if ratio > LOUD:
            warning = f"running streams stood still for {ratio:.1f} times their time per token, wanted {LOUD:g} at most"
            self._figures[f"WARNING, {name}"] = warning
            print(f"WARNING, {name}: {warning}", file=sys.stderr)

    # --- gaps --------------------------------------------------------------------------------------------------------

    def _gaps(self, figure: str, answers: Sequence[Answer], begin: float, end: float) -> float:
        """Tell clients' gaps that overlap a span of time, leave places for the engine's; return the longest."""
        at_clients = [gap for answer in answers for gap in gaps(answer.times, begin, end)]
        tell_gaps(self._figures, figure, "", at_clients)
        streamed = min(answer.times[0] for answer in answers), max(answer.times[-1] for answer in answers)
        self._spans_of_time.append((figure, begin, end, *streamed))
        for kind in ("longest", "p99"):
            self._figures[figure.format(kind, OF_STEPS)] = NOT_TOLD
        return max(at_clients, default=0.0)

    def tell_gaps_of_steps(self, ends: Sequence[float]) -> None:
        """Tell the gaps between ends of decode's steps beside the clients', from the same spans of time."""
        for figure, begin, end, first, last in self._spans_of_time:
            meanwhile = [ended for ended in ends if first <= ended <= last]  # between answers decode has no steps
            tell_gaps(self._figures, figure, OF_STEPS, gaps(meanwhile, begin, end))


def tell_gaps(figures: Figures, figure: str, whose: str, found: Sequence[float]) -> None:
    """Tell the longest of gaps and their 99th percentile; `figure` has places for which it is, and for `whose`."""
    if found:
        ordered = sorted(found)
        figures[figure.format("longest", whose)] = round(1e3 * ordered[-1], 2)
        figures[figure.format("p99", whose)] = round(1e3 * ordered[math.ceil(0.99 * len(ordered)) - 1], 2)


def parts_of_ttft(answers: Sequence[Answer]) -> str:
    """Return the medians of what times to the first token consist of, for people."""
    timed = [(answer.ttft_ms, answer.result.timing) for answer in answers if answer.result is not None]
    parts = {
        "waiting for prefill": [1e3 * timing.queue_s for _, timing in timed],
        "prefill": [1e3 * timing.prefill_s for _, timing in timed],
        "other services": [1e3 * (timing.ttft_s - timing.queue_s - timing.prefill_s) for _, timing in timed],
        "client": [ttft_ms - 1e3 * timing.ttft_s for ttft_ms, timing in timed],
    }
    return ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in parts.items()) + " ms"


def _list(answers: Sequence[Answer]) -> str:
    return " ".join(f"{answer.ttft_ms:.1f}" for answer in answers) + " ms"


def _tpot_s(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Seconds per token for one sequence, over all in a time span."""
    return (end - begin) * len(answers) / max(1, sum(answer.tokens_between(begin, end) for answer in answers))
