"""What an engine tells, checked: an engine may be broken, or lie, and its adapter goes on."""

from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from math import inf, isnan
from typing import Any, TypeVar

from moonpool.base.errors import Unavailable
from moonpool.interop.adapter.base import EngineClient, EngineFacts, EngineLoad, EngineOutput, EnginePrompt

T = TypeVar("T")
MAX_BLOCK_SIZE = 1 << 12
MAX_BLOCKS = 1 << 24
MAX_TOKENS = MAX_COUNT = (1 << 31) - 1
MAX_RANKS = 1024
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading an answer of another shape raises."""


class CheckedClient(EngineClient):
    """Speaks to an engine through another client, and takes nothing that cannot be.

    Whatever is wrong is Unavailable: the request goes on at another engine, and an engine that tells nonsense of itself
    is not there yet.

    Args:
        client: of the engine.
        vocab_size: of the model that the engine serves.
    """

    def __init__(self, client: EngineClient, vocab_size: int) -> None:
        self._client = client
        self._vocab_size = vocab_size

    async def describe(self) -> EngineFacts:
        facts = await _read(self._client.describe())
        _check("block size", facts.block_size, 1, MAX_BLOCK_SIZE)
        _check("number of blocks", facts.blocks, 1, MAX_BLOCKS)
        _check("longest sequence", facts.max_tokens, 1, MAX_TOKENS)
        _check("number of ranks", len(facts.sources), 1, MAX_RANKS)
        return facts

    async def load(self) -> tuple[str, EngineLoad]:
        life, load = await _read(self._client.load())
        for name in ("running", "waiting", "preemptions"):
            _check(name, getattr(load, name), 0, MAX_COUNT)
        if not 0 <= load.usage < inf:
            raise Unavailable(f"the engine tells a share of used blocks of {load.usage}")
        return life, load

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        left = prompt.max_tokens
        async with aclosing(self._client.generate(prompt)) as outputs:
            while (output := await _read(anext(outputs, None))) is not None:
                if len(output.token_ids) > left:
                    raise Unavailable(f"the engine gave more tokens than the {prompt.max_tokens} that were asked for")
                left = 0 if output.finish else left - len(output.token_ids)
                for token in output.token_ids:
                    _check("token", token, 0, self._vocab_size - 1)
                if output.cached_tokens is not None:
                    _check("number of cached tokens", output.cached_tokens, 0, len(prompt.token_ids))
                if prompt.params.logprobs is not None:
                    self._check_logprobs(output, prompt.params.logprobs)
                yield output

    def _check_logprobs(self, output: EngineOutput, top: int) -> None:
        found = output.logprobs
        count = 0 if found is None else len(found)
        if count != len(output.token_ids) or (found is not None and (not found.consistent or found.top > top)):
            raise Unavailable("the engine gave other log probabilities than were asked for")
        if found is not None and any(map(isnan, (*found.logprobs, *found.top_logprobs))):
            raise Unavailable("the engine gave a log probability that is no number")
        for token in () if found is None else found.top_token_ids:
            _check("token", token, 0, self._vocab_size - 1)

    def meeting(self, prompt: EnginePrompt) -> Mapping[str, Any] | None:
        return self._client.meeting(prompt)

    async def clear_cache(self) -> bool:
        return await self._client.clear_cache()

    async def aclose(self) -> None:
        await self._client.aclose()


async def _read(answer: Awaitable[T]) -> T:
    """An answer of the engine; Unavailable if the answer has another shape."""
    try:
        return await answer
    except _UNREADABLE as error:
        raise Unavailable(f"the engine's answer cannot be read: {error!r:.200}") from error


def _check(what: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise Unavailable(f"the engine tells a {what} of {value!r:.50}, which is not in [{least}, {most}]")
