"""Prompts that are computed at decode, over a real shell and pool: the answer is that of any other way."""

from pathlib import Path

import pytest

from moonpool.base.runtime.journal import journal_files, rerun
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, decoding, prompt, spec


@pytest.mark.parametrize("length", [1, BLOCK, 3 * BLOCK + 5])
async def test_a_prompt_that_nobody_holds(length: int, tmp_path: Path) -> None:
    tokens = prompt(length)
    async with decoding(chunked_prefill_size=20, journal_dir=str(tmp_path)) as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=2 * BLOCK))
        await conductor.compute("a", target)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == continuation(tokens, 2 * BLOCK)
        await decode.rest()
        decode.service.executor.close()
    [file] = journal_files(tmp_path)
    assert rerun(file, check=True).difference is None


async def test_the_next_turn_is_computed_behind_the_first_one() -> None:
    """Its answer's blocks are held as well, so little is left of the second prompt."""
    first = prompt(BLOCK + 3)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", first, max_tokens=3 * BLOCK))
        await transfer(decode, target, first)
        await conductor.start("a", target, continuation(first, 1)[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        second = [*first, *continuation(first, 3 * BLOCK), *prompt(9, 5)]
        target = await reserve(decode, spec("b", second, max_tokens=BLOCK))
        assert target.held_blocks == 4
        await conductor.compute("b", target)
        await conductor.until(lambda: "b" in conductor.reasons)
        assert conductor.tokens["b"] == continuation(second, BLOCK)
        assert decode.service.core.planner.starts.begun == 1
        await decode.rest()


@pytest.mark.parametrize("length", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
async def test_the_same_prompt_again_computes_what_its_full_blocks_leave(length: int) -> None:
    """Of one that ends with a full block its last token, which writes nothing."""
    tokens = prompt(length)
    async with decoding() as decode, conducting(decode) as conductor:
        for name in "abc":
            target = await reserve(decode, spec(name, tokens, max_tokens=BLOCK))
            assert target.held_blocks == (0 if name == "a" else length // BLOCK)
            await conductor.compute(name, target)
            await conductor.until(lambda name=name: name in conductor.reasons)  # type: ignore[misc]
            assert conductor.tokens[name] == continuation(tokens, BLOCK)
        assert decode.service.core.planner.starts.begun == 3
        await decode.rest()


async def test_what_cannot_be_computed_here_fails() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens, max_tokens=4))
        await conductor.compute("a", target)
        await conductor.until(lambda: "a" in conductor.reasons)
        several = await reserve(decode, spec("c", tokens, max_tokens=4, n=2))
        await conductor.compute("c", several)
        asked = spec("d", tokens, max_tokens=4)
        asked.sampling.prompt_logprobs = 1
        scored = await reserve(decode, asked)
        await conductor.compute("d", scored)
        await conductor.until(lambda: len(conductor.failed) == 2)
        assert conductor.failed == {
            "c": "a prompt is computed here for one answer only, without beams",
            "d": "a prompt whose log probabilities or embedding are wanted is not computed here",
        }
        await conductor.cancel("c", several)
        await conductor.cancel("d", scored)
        await conductor.until(lambda: {"c", "d"} <= conductor.outcomes.keys())
        await decode.rest()
