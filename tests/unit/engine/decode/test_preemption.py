"""Preemption over a real shell and pool: answers are the same, and the journal reruns to the same decisions."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import Overloaded
from moonpool.base.runtime.journal import journal_files, rerun
from tests.unit.engine.decode.calls import Conductor, conducting, reserve, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, Decode, decoding, prompt, spec

WAYS = ["recompute", "swap", "auto"]


async def begin(decode: Decode, conductor: Conductor, prompts: dict[str, list[int]], answer: int) -> None:
    """Requests up to their start; all are promised room before the first begins to grow."""
    targets = {name: await reserve(decode, spec(name, tokens, max_tokens=answer)) for name, tokens in prompts.items()}
    for name, target in targets.items():
        await transfer(decode, target, prompts[name])
        await conductor.start(name, target, continuation(prompts[name], 1)[0])


@pytest.mark.parametrize("way", WAYS)
async def test_answers_are_the_same_in_a_pool_too_small_for_all(way: str, tmp_path: Path) -> None:
    """Five answers of three blocks each, where one block was expected, in a pool for some of them."""
    prompts = {f"r{i}": prompt(10 + 3 * i, i) for i in range(5)}
    settings: dict[str, Any] = {
        "preemption": way,
        "assumed_answer_tokens": 4,
        "chunked_prefill_size": 20,
        "journal_dir": str(tmp_path),
    }
    async with decoding(blocks=12, **settings) as decode, conducting(decode) as conductor:
        _, go = decode.engine.hold()  # until all have begun
        await begin(decode, conductor, prompts, 3 * BLOCK)
        go.set()
        await conductor.until(lambda: len(conductor.reasons) == 5)
        assert conductor.tokens == {name: continuation(tokens, 3 * BLOCK)[1:] for name, tokens in prompts.items()}
        preempted = decode.service.core.preempted
        assert decode.service.load().preemptions == preempted.preemptions > 0
        assert (preempted.swaps > 0) == (way in ("swap", "auto"))
        assert len(decode.engine.fetched) == preempted.swaps, "what leaves the pool is all there"
        await decode.rest()
        digest = decode.service.core.digest()
        decode.service.executor.close()
        [file] = journal_files(tmp_path)
        again = rerun(file, check=True)
        assert again.difference is None
        assert again.events > 5 * 3 * BLOCK / 5
        assert again.core.digest() == digest


@pytest.mark.parametrize("way", WAYS)
async def test_preempted_in_every_step(way: str) -> None:
    """A sequence that is taken away after each token ends all the same, at each place in a block."""
    tokens = prompt(BLOCK - 2)
    async with decoding(preemption=way, preempt_every=1) as decode, conducting(decode) as conductor:
        await begin(decode, conductor, {"a": tokens}, 2 * BLOCK + 3)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == continuation(tokens, 2 * BLOCK + 3)[1:]
        assert decode.service.core.preempted.preemptions >= 2 * BLOCK


async def test_cancelled_while_swapped_out() -> None:
    """Whatever a sequence is doing, it can be cancelled, and everything comes back."""
    async with (
        decoding(blocks=8, preemption="swap", assumed_answer_tokens=4) as decode,
        conducting(decode) as conductor,
    ):
        targets = {}
        _, go = decode.engine.hold()  # until all have begun
        for name, seed in (("a", 1), ("b", 2), ("c", 3)):
            tokens = prompt(BLOCK, seed)
            targets[name] = await reserve(decode, spec(name, tokens, max_tokens=5 * BLOCK))
            await transfer(decode, targets[name], tokens)
            await conductor.start(name, targets[name], continuation(tokens, 1)[0])
        reached, on = decode.engine.hold(after=3 * BLOCK)
        go.set()
        await reached.wait()
        assert decode.service.core.preempted.preemptions > 0
        for name, target in targets.items():
            await conductor.cancel(name, target)
        await conductor.until(lambda: len(conductor.outcomes) == 3)
        on.set()
        await decode.rest()


async def test_the_promised_time_between_tokens_is_kept_from_newcomers() -> None:
    """Who was promised 2.5 ms a token gets it: a third sequence would make it 3 ms."""
    async with decoding() as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold()
        for name, slo in (("a", 0.0025), ("b", 0.0)):
            tokens = prompt(5, len(name))
            target = await reserve(decode, spec(name, tokens, max_tokens=6), **({"tbt_slo_s": slo} if slo else {}))
            await transfer(decode, target, tokens)
            await conductor.start(name, target, continuation(tokens, 1)[0])
        await reached.wait()
        with pytest.raises(Overloaded) as refused:
            await reserve(decode, spec("c", prompt(5)), tbt_slo_s=1.0)
        assert refused.value.reason == "tbt_slo"
        go.set()
        await conductor.until(lambda: len(conductor.reasons) == 2)
