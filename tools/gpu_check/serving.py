"""Serves a model through all services on the device of a stage, for stages that measure what clients see."""

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import LocalStack, ServiceProcess, StackPlan
from moonpool.client import AsyncClient, GenerateResult
from tools.gpu_check.where import CheckError, Figures, Where, expect

SEED = 30
ORDINARY_TOKENS = 16
"""Ids below are left to special tokens."""
ENDING_S = 20.0
"""Seconds within a stage's limit in which the services end."""
LOG_LINES, FAILED_LOG_LINES = 40, 300
"""Last lines of each service's log that the stage tells, and if the stage has failed."""
TIE = 0.01
"""Log probabilities that lie closer are not told apart: an answer is known up to the first such token."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model with random weights, and the memory for serving.

    Attributes:
        shape: `moonpool model create`'s shape.
        dtype: weights' and KV's dtype.
        longest: tokens of the longest sequence.
        pool_bytes: each engine's KV pool: both are on one GPU, so neither may take all free memory.
        store_bytes: DRAM of the kvstore, which has no SSD.
        max_num_batched_tokens: most tokens in a prefill step; 0 = the service's choice.
    """

    shape: str
    dtype: str
    longest: int
    pool_bytes: int
    store_bytes: int
    max_num_batched_tokens: int = 0

    @property
    def folder(self) -> str:
        """Name of the checkpoint's folder."""
        return f"{self.shape}-{self.dtype}"


SMALL = Served("qwen2.5-0.5b", "bfloat16", 40960, 4 << 30, 4 << 30)
EXACT = Served("qwen2.5-0.5b", "float32", 40960, 4 << 30, 4 << 30, max_num_batched_tokens=2048)
"""Rounding is so small that answers do not depend on what else runs."""
LARGE = Served("llama-3-8b", "bfloat16", 40960, 10 << 30, 8 << 30, max_num_batched_tokens=8192)
TINY = Served("tiny-qwen2", "bfloat16", 4096, 16 << 20, 16 << 20)
TINY_EXACT = Served("tiny-qwen2", "float32", 4096, 16 << 20, 16 << 20)
TINY_LLAMA = Served("tiny-llama", "bfloat16", 4096, 16 << 20, 16 << 20)


def checkpoint(where: Where, served: Served, figures: Figures) -> Path:
    """Return the folder with a model's checkpoint, created if missing."""
    from moonpool.engine.models.random_checkpoint import create

    folder = where.out / served.folder
    if folder.exists():
        return folder
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=where.out) as part:  # a full disk would fail other stages, too
        made = create(
            served.shape, Path(part) / "made", SEED, served.dtype, overrides={"max_position_embeddings": served.longest}
        )
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # no other stage was quicker
                raise
            return folder
    took, size = time.monotonic() - began, sum(file.stat().st_size for file in folder.iterdir())
    figures[f"create {served.folder}, s"] = round(took, 1)
    figures[f"create {served.folder}, GB/s"] = round(size / took / 1e9, 2)
    return folder


class CheckedStack(LocalStack):
    """A stack that reports starts and log lines, and ends at once after the stage has failed.

    Attributes:
        statuses: exit statuses of services, once the stack has ended in order.
    """

    def __init__(self, plan: StackPlan, start_limit_s: float) -> None:
        super().__init__(plan, on_ready=self._ready, on_start=self._starting)
        self._began, self._start_limit_s = time.monotonic(), start_limit_s
        self.statuses: dict[str, int] = {}

    def _tell(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _starting(self, service: ServiceProcess, what: str, done: int, of: int) -> None:
        if not of or done in (1, of):
            self._tell(f"{service.id}: {what}{f' {done}/{of}' if of else ''}")

    def _ready(self, service: ServiceProcess) -> None:
        self._tell(f"{service.id} is ready")

    def __enter__(self) -> Self:
        try:
            self.start(self._start_limit_s)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._tell_logs(LOG_LINES)
            self.statuses = self.stop(ENDING_S / 2)
        else:
            self._kill()

    def _kill(self) -> None:
        """End all processes without a drain: the frame soon kills a stage beyond the limit."""
        self._tell_logs(FAILED_LOG_LINES)
        for service in self.services.values():
            service.signal(signal.SIGKILL)
        for service in self.services.values():
            service.wait(ENDING_S)
        self.services.clear()

    def stop_one(self, service_id: str) -> int:
        """Stop a service in order; return the exit status."""
        self.services[service_id].signal(signal.SIGTERM)
        return self.services[service_id].wait(ENDING_S)

    def expect_all_run(self, what: str) -> None:
        """Fail if a service has ended; `what` was noticed before.

        Raises:
            CheckError: names the service, with the end of the service's log.
        """
        for service in self.services.values():
            ended = service.returncode is not None
            expect(not ended, f"{what}: {service.id} ended with status {service.returncode}\n{service.log_tail()}")

    def expect_ended_in_order(self) -> None:
        """Fail if a service had to be killed, or logged an error at the end.

        Raises:
            CheckError: names all.
        """
        wrong = [f"{name} ended with status {status}" for name, status in self.statuses.items() if status]
        expect(not wrong, "; ".join(wrong))

    def _tell_logs(self, count: int) -> None:
        for service in self.services.values():
            lines = service.log_path.read_text(errors="replace").splitlines()
            print(*(f"{service.id}| {line}" for line in lines[-count:]), sep="\n", file=sys.stderr, flush=True)


def plan_of(
    where: Where, served: Served, model: Path, name: str, extra: Mapping[str, Sequence[str]] | None = None
) -> StackPlan:
    """Return the plan of a stack with both engines on the device; logs are in the folder `name`.

    Decode guesses no tokens: a time per token is that of a step.
    """
    device, more = ("--device", where.device), dict(extra or {})
    more["decode"] = ("--speculative", "off", *more.get("decode", ()))
    if served.max_num_batched_tokens:
        more["prefill"] = ("--max-num-batched-tokens", str(served.max_num_batched_tokens), *more.get("prefill", ()))
    return StackPlan(
        model=str(model),
        data_dir=where.out / name,
        dtype=served.dtype,
        threads=1 if where.tiny else 0,
        kv_cache_memory_bytes=served.pool_bytes,
        dram_bytes=served.store_bytes,
        ssd_bytes=0,
        extra={**more, **{kind: [*device, *more.get(kind, ())] for kind in ("prefill", "decode")}},
    )


@dataclass(slots=True)
class Answer:
    """An answer as received. Seconds of the event loop's clock.

    Attributes:
        sent: when the request was sent.
        times: when tokens came.
        counts: how many had come then.
        tokens: they.
        result: None until the answer's end.
    """

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    result: GenerateResult | None = None
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def came(self, tokens: Sequence[int], now: float) -> None:
        """Note tokens that came."""
        self.tokens += tokens
        self.times.append(now)
        self.counts.append(len(self.tokens))
        self._more.set()

    async def has(self, tokens: int) -> None:
        """Wait until so many tokens have come."""
        while len(self.tokens) < tokens:
            self._more.clear()
            await self._more.wait()

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token."""
        return 1e3 * (self.times[0] - self.sent)

    @property
    def cached(self) -> int:
        """Prompt tokens with reused KV."""
        return 0 if self.result is None else self.result.usage.cached_tokens

    @property
    def placed(self) -> str:
        """The instance that computed the prompt."""
        return "" if self.result is None else self.result.placement.prefill

    def tokens_between(self, begin: float, end: float) -> int:
        """Tokens that came in a span of time."""
        marks = [0, *(count for moment, count in zip(self.times, self.counts, strict=True) if moment <= end)]
        before = [0, *(count for moment, count in zip(self.times, self.counts, strict=True) if moment <= begin)]
        return marks[-1] - before[-1]


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the seconds between successive times, of gaps that overlap a span of time."""
    return [later - earlier for earlier, later in pairwise(times) if earlier < end and later > begin]


def step_ends(spans: Path) -> list[float]:
    """Return when decode steps ended, by a service's recorded spans: seconds of the event loop's clock on this host."""
    told = [json.loads(line) for line in spans.read_text(encoding="utf-8").splitlines()]
    return sorted((span["ts"] + span["dur"]) / 1e6 for span in told if span["name"] == "decode.step")


def greedy(tokens: int, **more: Any) -> SamplingParams:
    """Exactly so many greedy tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **more)


async def ask(
    client: AsyncClient, prompt: Sequence[int], sampling: SamplingParams, answer: Answer | None = None, **more: Any
) -> Answer:
    """Ask, and return when each part of the answer came; `answer` is filled in meanwhile."""
    answer = Answer() if answer is None else answer
    clock = asyncio.get_running_loop().time
    answer.sent = clock()
    stream = client.stream(token_ids=prompt, sampling=sampling, **more)
    async with contextlib.aclosing(stream):
        async for event in stream:
            if event.token_ids:
                answer.came(event.token_ids, clock())
    answer.result = stream.result
    expect(bool(answer.times), "an answer had no tokens")
    return answer


def known_part(result: GenerateResult) -> list[int]:
    """Return the tokens of an answer, asked for with two log probabilities each, up to the first near tie."""
    known = []
    for token, told in zip(result.token_ids, result.logprobs, strict=True):
        (_, best), (_, second) = told.top[:2]
        if best - second < TIE:
            break
        known.append(token)
    return known


class Prompts:
    """Fresh random prompts, the same in each run."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(SEED)
        self._vocab_size = vocab_size

    def __call__(self, tokens: int) -> list[int]:
        """Return ordinary token ids."""
        return [self._random.randrange(ORDINARY_TOKENS, self._vocab_size) for _ in range(tokens)]


def run_until(limit_s: float, work: Coroutine[Any, Any, None], doing: Callable[[], str]) -> None:
    """Run asynchronous work, for `limit_s` seconds at most.

    Raises:
        CheckError: the work took longer, or the frame ends the stage; names the current work.
    """
    ended = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(_limited(limit_s, work))
    except (TimeoutError, asyncio.CancelledError):
        raise CheckError(f"out of time: {doing()}") from None
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        signal.signal(signal.SIGTERM, ended)


async def _limited(limit_s: float, work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(max(0.0, limit_s)):
        task = asyncio.ensure_future(work)
        # An error that a handler raises is lost where the loop runs a callback.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def gpu_memory_mib(where: Where) -> int:
    """Return the memory of the GPU in use, by all processes; 0 if that cannot be told."""
    if not where.on_gpu:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        return int(subprocess.check_output(command, text=True, timeout=10).partition("\n")[0])
    return 0
