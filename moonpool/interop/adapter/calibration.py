"""Speeds of an engine: from a few prompts, with which predictions start; and step by step, for a profile."""

import asyncio
import statistics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moonpool.base import world
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds
from moonpool.interop.adapter.base import EngineClient, EngineFacts, EnginePrompt

LONG_TOKENS = 512
LONGEST_TOKENS = 8192
LONGEST_S = 2.0
"""Predicted seconds of the longest prompt, by which it is seen how work grows with the square of the length."""
ANSWER_TOKENS = 8
LEAST_S = 1e-6


async def measured_speeds(
    client: EngineClient, facts: EngineFacts, vocab_size: int, clock: Callable[[], float] = world.monotonic
) -> Speeds:
    """Speeds by prompts of two or three lengths that are not shared.

    The third is several times as long as the second, where the engine takes such prompts and is quick enough.

    Raises:
        Unavailable: the engine does not answer.
    """
    short = facts.block_size
    most = min(facts.max_tokens - ANSWER_TOKENS - 1, facts.blocks * facts.block_size // 2)
    long = max(short + 1, min(LONG_TOKENS, most))
    await _timed(client, short, vocab_size, clock)  # an engine's first step takes longer
    short_s, _ = await _timed(client, short, vocab_size, clock)
    long_s, token_s = await _timed(client, long, vocab_size, clock)
    times = [(short, short_s), (long, long_s)]
    longest = min(most, round(long * LONGEST_S / max(long_s, LEAST_S)), LONGEST_TOKENS)
    if longest >= 2 * long:
        times.append((longest, (await _timed(client, longest, vocab_size, clock))[0]))
    base_s, per_token_s, per_pair_s = growth(times)
    return Speeds(
        prefill_base_s=base_s,
        prefill_per_token_s=per_token_s,
        prefill_per_pair_s=per_pair_s,
        decode_base_s=max(token_s, LEAST_S),
        decode_per_sequence_s=max(token_s, LEAST_S) / 100,
    )


def growth(times: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Seconds of a prompt, of each token, and of each pair of tokens, by two or three lengths with their seconds."""
    (short, short_s), *_, (long, long_s) = times
    per_token_s, per_pair_s = (long_s - short_s) / (long - short), 0.0
    if len(times) > 2:
        between, between_s = times[1]
        first_s, second_s = (between_s - short_s) / (between - short), (long_s - between_s) / (long - between)
        per_pair_s = max(0.0, 2 * (second_s - first_s) / (long - short))
        per_token_s -= per_pair_s * (long + short) / 2
    if per_token_s < LEAST_S:  # a slow moment: all lengths lie on a line
        per_token_s, per_pair_s = max((long_s - short_s) / (long - short), LEAST_S), 0.0
    return max(short_s - short * per_token_s, LEAST_S), per_token_s, per_pair_s


async def keeps_kv(client: EngineClient) -> bool:
    """Whether the engine can keep a prompt's KV for another engine.

    Raises:
        Unavailable: the engine does not answer.
    """
    prompt = replace(_prompt(1, 1, 1), keep=True)
    if client.meeting(prompt) is not None:
        return True
    return bool([output async for output in client.generate(prompt)][-1].transfer)


def _prompt(tokens: int, answer_tokens: int, vocab_size: int) -> EnginePrompt:
    """A prompt that shares no KV."""
    ids = array("i", [world.random_bits(30) % vocab_size for _ in range(tokens)])
    params, salt = SamplingParams(temperature=0.0), f"calibration:{world.random_hex(8)}"
    return EnginePrompt("calibration", ids, params, 0, answer_tokens, answer_tokens, (), salt, 0, -1, timed=True)


async def _timed(client: EngineClient, tokens: int, vocab_size: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds to the first token, and from one to the next."""
    prompt = _prompt(tokens, ANSWER_TOKENS, vocab_size)
    began, times = clock(), list[float]()
    async for output in client.generate(prompt):
        times += [clock()] * len(output.token_ids)
    return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)


DECODE_STEPS = 16
"""Tokens that each answer has in a measured batch."""
PREFILL_BLOCKS = (1, 4, 16)
BATCHES = (1, 4, 16)
CONTEXT_BLOCKS = (1, 8)


class StepSeconds(NamedTuple):
    """What a step took: tokens and tokens before them of a prompt, or answers and tokens of each of them."""

    size: tuple[int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineTimer:
    """Times steps of an engine that does nothing else.

    Attributes:
        client: of the engine.
        facts: of the engine.
        vocab_size: of its model.
        repeats: times that each size is measured; the median counts.
        clock: gives seconds.
    """

    client: EngineClient
    facts: EngineFacts
    vocab_size: int
    repeats: int = 3
    clock: Callable[[], float] = world.monotonic

    async def prefill(self) -> list[StepSeconds]:
        """Prompts of several lengths, also behind cached prefixes. Raises Unavailable."""
        size, room = self.facts.block_size, self._room()
        grid = [(new * size, before * size) for new in PREFILL_BLOCKS for before in (0, *PREFILL_BLOCKS[1:])]
        await self._prefilled(size, 0)  # an engine's first step takes longer
        found = []
        for tokens, prefix in grid:
            if tokens + prefix < room:
                times = [await self._prefilled(tokens, prefix) for _ in range(self.repeats)]
                found.append(StepSeconds((tokens, prefix), statistics.median(times)))
        return found

    async def decode(self) -> list[StepSeconds]:
        """Batches of answers of several lengths. Raises Unavailable."""
        size, room = self.facts.block_size, self._room()
        found = []
        for batch in BATCHES:
            for blocks in CONTEXT_BLOCKS:
                context = blocks * size
                if context + DECODE_STEPS < room and batch * (context + DECODE_STEPS) < room * 2:
                    times = [await self._decoded(batch, context) for _ in range(self.repeats)]
                    found.append(StepSeconds((batch, context + DECODE_STEPS // 2), statistics.median(times)))
        return found

    def _room(self) -> int:
        """Tokens of the longest prompt: half of the engine's memory at most."""
        return min(self.facts.max_tokens, self.facts.blocks * self.facts.block_size // 2)

    async def _prefilled(self, tokens: int, prefix: int) -> float:
        whole = _prompt(prefix + tokens, 1, self.vocab_size)
        if prefix:
            await self._times(replace(whole, token_ids=whole.token_ids[: prefix + 1]))
        began = self.clock()
        return (await self._times(whole))[0] - began

    async def _decoded(self, batch: int, context: int) -> float:
        """Seconds of a step while all answers run."""
        prompts = [_prompt(context, DECODE_STEPS, self.vocab_size) for _ in range(batch)]
        every = await asyncio.gather(*[self._times(prompt) for prompt in prompts])
        begin, end = max(times[0] for times in every), min(times[-1] for times in every)
        steps = sum([begin < at <= end for times in every for at in times]) / batch
        return (end - begin) / steps if steps else max(times[-1] - times[0] for times in every) / (DECODE_STEPS - 1)

    async def _times(self, prompt: EnginePrompt) -> list[float]:
        """When each token came."""
        times = list[float]()
        async for output in self.client.generate(prompt):
            times += [self.clock()] * len(output.token_ids)
        return times
