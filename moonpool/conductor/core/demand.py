"""Tokens and blocks that a request needs."""

from typing import NamedTuple

from moonpool.base.frozen import frozen
from moonpool.conductor.core.kv_shape import KVShape


@frozen
class Demand:
    """Tokens and blocks that a request needs.

    Attributes:
        prompt_tokens: to compute.
        prompt_blocks: for the prompt at prefill.
        total_blocks: for the prompt and the longest answers at decode.
        decode_tokens: expected from decode, in each of `choices` answers.
        choices: answers that run together.
        needs: sampling options that the instances must have.
        expected_tokens: that the client expects of each answer; 0 = not told.
        pictures: where pictures that must be encoded stand in the prompt, [begin, end).
        encoded: the same of those whose rows a kvstore holds.
    """

    prompt_tokens: int
    prompt_blocks: int
    total_blocks: int
    decode_tokens: int
    choices: int = 1
    needs: tuple[str, ...] = ()
    expected_tokens: int = 0
    pictures: tuple[tuple[int, int], ...] = ()
    encoded: tuple[tuple[int, int], ...] = ()


class MemoryNeed(NamedTuple):
    """What a request's memory depends on: tokens now, blocks with the longest answers, number of answers.

    `expected`: tokens that the client expects of each answer; 0 = not told.
    """

    tokens: int
    longest: int
    choices: int = 1
    expected: int = 0


def expected_blocks(shape: KVShape, need: MemoryNeed, answer_tokens: int) -> int:
    """Return the number of blocks that a request is expected to need.

    Args:
        shape: KV shape.
        need: the request's.
        answer_tokens: length that the decode instance expects of an answer; 0 = not reported: the longest. What the
            client expects counts before.
    """
    expected = need.expected or answer_tokens
    if not expected:
        return need.longest
    return min(shape.blocks_for_choices(need.tokens, expected, need.choices), need.longest)
