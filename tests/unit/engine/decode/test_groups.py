"""Several answers to one prompt at a decode instance."""

from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.v1 import kv_pb2
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, decoding, prompt, spec

FIRST = (9, 11, 13)


@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 1}])
async def test_each_goes_on_from_its_first_token(length: int, flags: dict[str, Any]) -> None:
    """The prompt's KV comes once. Tokens are a function of the KV: a block of another answer would change them."""
    tokens = prompt(length)
    async with decoding(**flags) as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=BLOCK + 3, n=3))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, *FIRST)
        await conductor.until(lambda: len(conductor.reasons) == 3)
        for name, first in zip(("a", "a/1", "a/2"), FIRST, strict=True):
            assert conductor.tokens[name] == continuation([*tokens, first], BLOCK + 2)
            assert conductor.reasons[name] == kv_pb2.FINISH_REASON_LENGTH
        await decode.rest()


async def test_one_is_stopped_and_told_no_more() -> None:
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold()
        target = await reserve(decode, spec("a", tokens, max_tokens=6, n=2))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, *FIRST[:2])
        await reached.wait()
        await conductor.cancel("a", target, 1)
        await decode.until(
            lambda: any(sequence.stopped for live in decode.service.executor for sequence in live.sequences)
        )
        go.set()
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens == {"a": continuation([*tokens, FIRST[0]], 5)}
        assert conductor.outcomes == {}
        await decode.rest()
        assert [len(step.sequences) for step in decode.engine.steps] == [2, 1, 1, 1, 1]


async def test_each_needs_a_first_token() -> None:
    tokens = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, n=2))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, 9)
        await conductor.until(lambda: bool(conductor.failed))
        assert conductor.failed == {"a": "2 answers are wanted, each has a first token"}
        await conductor.cancel("a", target)
        await decode.rest()


async def test_what_can_never_fit_is_refused() -> None:
    async with decoding(blocks=12, max_num_seqs=4) as decode:
        with pytest.raises(InvalidRequest, match="4 batch slots") as refused:
            await reserve(decode, spec("a", prompt(3), n=5))
        assert refused.value.field == "sequence.sampling.n"
        with pytest.raises(InvalidRequest, match="needs 14 blocks, this instance has 12") as refused:
            await reserve(decode, spec("a", prompt(2 * BLOCK), max_tokens=3 * BLOCK, n=4))
        assert refused.value.field == "sequence.sampling.max_tokens"
        await decode.rest()
