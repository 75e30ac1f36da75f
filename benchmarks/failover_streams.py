"""Streams that are followed while something happens to the services behind them: when each of their tokens came."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient

UNDER_WAY = 8
"""Tokens after which a stream decodes."""


@dataclass(slots=True)
class Stream:
    """One stream. Times are `time.monotonic()`.

    Attributes:
        prompt: token ids.
        tokens: that came; `times` when each message with some of them came.
        decode: the instance of the stream when the fault happened; `prefill` where its prompt was computed.
        faulted_at: when the fault happened.
    """

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    decode: str = ""
    prefill: str = ""
    faulted_at: float = 0.0

    @property
    def wait_s(self) -> float:
        """Longest wait for a token from the fault on; the part of a wait that lies before it does not count."""
        return longest_wait_s(self.times, self.faulted_at)


def longest_wait_s(times: Sequence[float], since: float) -> float:
    """Longest of the waits between these times that end after `since`, from `since` on; 0 when none does."""
    waits = [after - max(before, since) for before, after in itertools.pairwise(times) if after > since]
    return max(waits, default=0.0)


async def follow(
    addresses: Sequence[str],
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    fault: Callable[[Sequence[Stream]], None],
) -> list[Stream]:
    """Streams all answers at once; calls `fault` in a thread once each has had first tokens."""
    streams = [Stream(prompt) for prompt in prompts]
    under_way = asyncio.Barrier(len(streams) + 1)
    async with AsyncClient(addresses) as client, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(_follow(client, stream, answer_tokens, under_way))
        await under_way.wait()
        now = time.monotonic()
        for stream in streams:
            stream.faulted_at = now
        await asyncio.to_thread(fault, streams)
    return streams


async def _follow(client: AsyncClient, stream: Stream, answer_tokens: int, under_way: asyncio.Barrier) -> None:
    sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
    arriving: asyncio.Task[object] | None = None
    running = client.stream(token_ids=stream.prompt, sampling=sampling)
    async for event in running:
        stream.tokens += event.token_ids
        stream.times.append(time.monotonic())
        if arriving is None and len(stream.tokens) >= UNDER_WAY:
            assert running.placement is not None
            stream.decode, stream.prefill = running.placement.decode, running.placement.prefill
            arriving = asyncio.create_task(under_way.wait())  # the stream is read on
    assert arriving is not None, "an answer ended before all streams were under way: it is too short"
    await arriving
