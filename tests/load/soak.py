"""Load for a long time: answers stay right, and no process grows. `python -m tests.load.soak --seconds 3600`.

A local stack in float32 answers greedy requests with known answers, those of a plain forward pass made beforehand,
among sampled ones whose prompts are new each time, so that pool and store fill and throw out. The memory of every
process is sampled; without shared memory, as the pool's pages are touched bit by bit. It is flat when the last quarter
of the run has no more than the second, by SLACK. Engines also keep the bound that they have told at start. A kvstore's
memory goes up and down with the blocks that move, so that quarters say nothing: it keeps the bound of docs/kvstore.md.
Requests that are refused for lack of room are asked again when the refusal says so; few may be.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.errors import MoonpoolError, Overloaded
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest, closed_loop, numbers_until
from moonpool.cli.load_generator.senders import greedy
from moonpool.cli.models import chosen_model
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.stage import StageModel
from moonpool.kvstore.config import KVStoreConfig
from moonpool.kvstore.dram.arena import RESERVE_SHARE

PROMPTS, LONGEST, ANSWER, CHUNK = 12, 1200, 24, 512
TIE = 1e-3
"""Logits that lie closer are not told apart: an answer is known up to the first such token."""
CONCURRENCY, KNOWN_SHARE = 6, 0.5
SAMPLE_S, SAY_S = 2.0, 30.0
GROWTH, GROWTH_BYTES = 0.03, 16 << 20
"""SLACK: a process may have grown by so much, whichever is more."""
STORE_BYTES = 64 << 20
"""What a kvstore holds beside blocks on their way: "some 50 MB for itself", and its index."""
REFUSED_SHARE = 0.1
"""Of all requests, refusals among them, may be refused."""
TEXT = Path(__file__).parents[2] / "docs"
_BOUND = re.compile(r"\bmemory\b.*\bbound_mib\W+(\d+).*\bpid\W+(\d+)")


# --- known answers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt, and the tokens that its answer begins with."""

    prompt: list[int]
    answer: list[int]


class Plain:
    """A model that computes one sequence at a time."""

    def __init__(self, path: Path) -> None:
        self._config = load_config(path)
        self._stage: StageModel = load_stage(path, self._config, torch.float32, 0, self._config.num_layers)

    @torch.inference_mode()
    def known(self, prompt: list[int]) -> Known:
        """The greedy answer, as far as it is certain."""
        config, size = self._config, 16
        blocks = list(range(-(-(len(prompt) + ANSWER) // size)))
        pool = torch.zeros(config.num_layers, len(blocks), config.num_kv_heads, 2, size, config.head_dim)
        tokens, done = list(prompt), 0
        while True:
            chunk = tokens[done : done + CHUNK]
            batch = PackedBatch.build([(array("i", chunk).tobytes(), done, blocks)], size)
            logits = self._stage.logits(self._stage.forward(batch.token_ids, batch, pool)[-1:])
            done += len(chunk)
            if done < len(tokens):
                continue
            (best, second), (token, _) = (found[0].tolist() for found in logits.topk(2))
            if best - second < TIE or len(tokens) == len(prompt) + ANSWER:
                return Known(prompt, tokens[len(prompt) :])
            tokens.append(token)


def prompts(path: Path) -> Iterator[list[int]]:
    """Prose of this project, of many lengths; every other prompt goes on where the one before ended."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(TEXT.glob("*.md")))
    tokens = Tokenizer.load(path).encode(text)
    longest = min(LONGEST, load_config(path).max_position_embeddings // 2)
    for number in range(PROMPTS):
        begin = number // 2 * longest
        length = 40 + (longest - 40) * number // PROMPTS
        yield tokens[begin : begin + (length if number % 2 else length // 2)]


# --- memory ----------------------------------------------------------------------------------------------------------


def own_bytes(pid: int) -> int:
    """What a process holds in memory, shared memory excepted; 0 once it is gone."""
    return _status_bytes(pid, "RssAnon", "RssFile")


def all_bytes(pid: int) -> int:
    """What a process holds in memory."""
    return _status_bytes(pid, "VmRSS")


def private_bytes(pid: int) -> int:
    """What a process holds in memory that is neither shared nor a file's."""
    return _status_bytes(pid, "RssAnon")


def _status_bytes(pid: int, *names: str) -> int:
    with contextlib.suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(words[1]) << 10 for words in lines if words and words[0].rstrip(":") in names)
    return 0


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


@dataclass(slots=True)
class Watched:
    """A process.

    Attributes:
        name: of its service, or that and "engine".
        bound: bytes that it has promised to keep, 0 = none.
        bounded: what of its memory the bound is for.
        level: it has as much memory at the end as before.
        sizes: samples of its own memory.
        most: of what the bound is for.
    """

    name: str
    pid: int
    bound: int = 0
    bounded: Callable[[int], int] = all_bytes
    level: bool = True
    sizes: list[int] = field(default_factory=list)
    most: int = 0

    def look(self) -> None:
        """One more sample."""
        self.sizes.append(own_bytes(self.pid))
        self.most = max(self.most, self.bounded(self.pid))

    def faults(self) -> Iterator[str]:
        """What is wrong with it, in words."""
        before, after = quarters(self.sizes)
        if self.level and after - before > max(GROWTH * before, GROWTH_BYTES):
            yield f"{self.name} grew from {before >> 20} to {after >> 20} MiB"
        if self.bound and self.most > self.bound:
            yield f"{self.name} had {self.most >> 20} MiB, its bound is {self.bound >> 20}"
        if 0 in self.sizes:
            yield f"{self.name} ended"


def quarters(sizes: Sequence[int]) -> tuple[int, int]:
    """Medians of the second quarter and of the last."""
    quarter = max(1, len(sizes) // 4)
    return int(statistics.median(sizes[quarter : 2 * quarter] or sizes)), int(statistics.median(sizes[-quarter:]))


def bounds(log: str) -> dict[int, int]:
    """Bytes that engine processes have told as their bounds, by process."""
    return {int(found[2]): int(found[1]) << 20 for found in map(_BOUND.search, log.splitlines()) if found}


def store_bound(plan: StackPlan) -> int:
    """Bytes that a kvstore may hold: its DRAM tier with free slots, what writers are ahead, what is read ahead."""
    usual = {name: KVStoreConfig.model_fields[name].default for name in ("window_bytes", "read_ahead_bytes")}
    dram = plan.dram_bytes + plan.dram_bytes // RESERVE_SHARE
    writers = plan.prefill + plan.decode
    return int(dram + writers * usual["window_bytes"] + usual["read_ahead_bytes"] + STORE_BYTES)


def watched(stack: LocalStack) -> list[Watched]:
    """All processes of a stack."""
    found = []
    for service in stack.services.values():
        if service.kind == "kvstore":
            found.append(Watched(service.id, service.pid, store_bound(stack.plan), private_bytes, level=False))
            continue
        found.append(Watched(service.id, service.pid))
        told = bounds(service.log_path.read_text(errors="replace"))
        found += [Watched(f"{service.id} engine", pid, told[pid]) for pid in children(service.pid) if pid in told]
    return found


# --- load ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Soak:
    """One run."""

    known: list[Known]
    vocab: int
    until: float
    draws: random.Random
    checked: int = 0
    others: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def ended(self) -> bool:
        """Whether no further request is wanted: the time is over, or too much is wrong."""
        return time.monotonic() >= self.until or len(self.wrong) >= 10

    def sender(self, client: AsyncClient) -> SendRequest:
        """Asks a request, and checks its answer."""

        async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            try:
                if self.draws.random() < KNOWN_SHARE:
                    await self._ask_known(client, self.draws.choice(self.known))
                else:
                    await self._ask_new(client, self.draws.choice(self.known))
            except Overloaded as refusal:
                self.refused += 1
                await asyncio.sleep(refusal.retry_after_s)
            except MoonpoolError as error:
                self.fault(f"a request failed: {error}")

        return send

    def fault(self, text: str) -> None:
        """Something is wrong: it is said at once, and again at the end."""
        self.wrong.append(text)
        say(text)

    async def _ask_known(self, client: AsyncClient, known: Known) -> None:
        result = await client.generate(token_ids=known.prompt, sampling=greedy(ANSWER))
        self.checked += 1
        if list(result.token_ids)[: len(known.answer)] != known.answer or len(result.token_ids) != ANSWER:
            self.fault(f"wrong answer to a prompt of {len(known.prompt)} tokens: {list(result.token_ids)}")

    async def _ask_new(self, client: AsyncClient, known: Known) -> None:
        keep = self.draws.randrange(len(known.prompt) + 1)
        tail = [self.draws.randrange(8, self.vocab) for _ in range(len(known.prompt) - keep + 1)]
        how = SamplingParams(
            max_tokens=self.draws.randint(1, 3 * ANSWER), temperature=0.8, top_p=0.95, seed=self.draws.getrandbits(32),
            ignore_eos=True,
        )  # fmt: skip
        result = await client.generate(token_ids=known.prompt[:keep] + tail, sampling=how)
        self.others += 1
        if len(result.token_ids) != how.max_tokens:
            self.fault(f"{len(result.token_ids)} tokens instead of {how.max_tokens}")

    async def run(self, stack: LocalStack, processes: Sequence[Watched], begin: float) -> None:
        """Loads the stack, samples memory, says how far it is."""
        async with AsyncClient(stack.address) as client:
            load = asyncio.create_task(closed_loop(CONCURRENCY, numbers_until(self.ended), self.sender(client)))
            said = begin
            while not load.done():
                await asyncio.wait([load], timeout=SAMPLE_S)
                for process in processes:
                    process.look()
                if time.monotonic() - said > SAY_S:
                    said = time.monotonic()
                    say(self.progress(processes, said - begin))
            await load

    def progress(self, processes: Sequence[Watched], passed: float) -> str:
        """A line."""
        sizes = ", ".join(f"{process.name} {process.sizes[-1] >> 20}" for process in processes)
        asked = f"{self.checked} checked, {self.others} others, {self.refused} refused, {len(self.wrong)} wrong"
        return f"{passed:.0f} s: {asked}; MiB: {sizes}"


def say(text: str) -> None:
    """Prints at once."""
    print(text, flush=True)


def verdict(soak: Soak, processes: Sequence[Watched]) -> list[str]:
    """All faults; prints a line for each process."""
    for process in processes:
        before, after = quarters(process.sizes)
        bound = f"; at most {process.most >> 20} of its bound of {process.bound >> 20}" if process.bound else ""
        say(f"{process.name}: {before >> 20} MiB in the second quarter, {after >> 20} in the last{bound}")
    faults = [*soak.wrong, *(fault for process in processes for fault in process.faults())]
    if not any(process.bound and process.level for process in processes):
        faults.append("no engine has told its bound")
    if soak.refused > REFUSED_SHARE * (soak.refused + soak.checked + soak.others):
        faults.append(f"{soak.refused} requests were refused for lack of room")
    if not soak.checked:
        faults.append("no answer was checked")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Runs; returns 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long")
    parser.add_argument("--model", default="smollm2", help="as of `moonpool serve`; empty = the bundled one")
    parser.add_argument("--kv-dtype", default="auto", help="as of `moonpool serve`; answers are known for auto only")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30), help="of all draws")
    options = parser.parse_args(argv)
    path = Path(chosen_model(options.model))
    say(f"seed {options.seed}, {options.seconds:g} s on {path.name}; {os.cpu_count()} cores")
    plain = Plain(path)
    known = [plain.known(prompt) for prompt in prompts(path)]
    del plain
    say(f"{len(known)} answers known, of {sum(len(each.answer) for each in known)} tokens")
    with tempfile.TemporaryDirectory(prefix="moonpool-soak-") as folder:
        plan = StackPlan(
            model=str(path), data_dir=Path(folder), dtype="float32", kv_cache_dtype=options.kv_dtype,
            kv_cache_memory_bytes=128 << 20, dram_bytes=32 << 20, ssd_bytes=512 << 20,
        )  # fmt: skip
        with LocalStack(plan) as stack:
            processes, begin = watched(stack), time.monotonic()
            vocab = load_config(path).vocab_size
            soak = Soak(known, vocab, begin + options.seconds, random.Random(options.seed))
            asyncio.run(soak.run(stack, processes, begin))
    faults = verdict(soak, processes)
    for fault in faults:
        say(f"FAULT: {fault}")
    say(
        f"{'FAILED' if faults else 'passed'}: {soak.checked} answers checked, {soak.others} others, "
        f"{soak.refused} refused, seed {options.seed}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
