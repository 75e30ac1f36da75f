"""First speeds of an engine, from a few prompts: the conductor's predictions start with them."""

from array import array
from dataclasses import replace

from moonpool import world
from moonpool.sampling_params import SamplingParams
from moonpool.scheduling.latency import Speeds
from services.adapter.base import EngineClient, EngineFacts, EnginePrompt

LONG_TOKENS = 512
ANSWER_TOKENS = 8
LEAST_S = 1e-6


async def measured_speeds(client: EngineClient, facts: EngineFacts, vocab_size: int) -> Speeds:
    """Speeds by a short and a long prompt that are not shared.

    Raises:
        Unavailable: the engine does not answer.
    """
    short = facts.block_tokens
    most = min(facts.max_tokens - ANSWER_TOKENS - 1, facts.blocks * facts.block_tokens // 2)
    long = max(short + 1, min(LONG_TOKENS, most))
    await _timed(client, short, vocab_size)  # an engine's first step takes longer
    short_s, _ = await _timed(client, short, vocab_size)
    long_s, token_s = await _timed(client, long, vocab_size)
    per_token_s = max((long_s - short_s) / (long - short), LEAST_S)
    return Speeds(
        prefill_base_s=max(short_s - short * per_token_s, LEAST_S),
        prefill_per_token_s=per_token_s,
        decode_base_s=max(token_s, LEAST_S),
        decode_per_sequence_s=max(token_s, LEAST_S) / 100,
    )


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
    return EnginePrompt("calibration", ids, params, 0, answer_tokens, answer_tokens, (), salt, 0, -1)


async def _timed(client: EngineClient, tokens: int, vocab_size: int) -> tuple[float, float]:
    """Seconds to the first token, and from one to the next."""
    prompt = _prompt(tokens, ANSWER_TOKENS, vocab_size)
    began, times = world.monotonic(), list[float]()
    async for output in client.generate(prompt):
        times += [world.monotonic()] * len(output.token_ids)
    return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)
