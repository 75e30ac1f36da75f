"""Whole prompts that are computed at decode, over a real shell and pool: as an instance of role both serves them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.base.runtime.journal import journal_files, rerun
from moonpool.engine.decode.core.events import SearchRules
from moonpool.v1 import kv_pb2
from tests.unit.engine.decode.calls import Conductor, conducting, reserve
from tests.unit.engine.decode.core.plain_beams import plain_search
from tests.unit.fakes.engine import continuation, digest_after, first_tokens, most_likely
from tests.unit.instances import BLOCK, Decode, decoding, prompt, spec

BOTH: dict[str, Any] = {"computes_prompts": True}


async def whole(
    decode: Decode, conductor: Conductor, asked: kv_pb2.SequenceSpec, **fields: Any
) -> kv_pb2.TransferTarget:
    """Reserves for a request and starts it."""
    target = await reserve(decode, asked, computes_prompt=True)
    await conductor.compute(asked.request_id, target, max(1, asked.sampling.n), **fields)
    return target


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 20 * BLOCK + 1])
@pytest.mark.parametrize("answer", [1, 2 * BLOCK])
async def test_a_prompt_of_any_length(length: int, answer: int, tmp_path: Path) -> None:
    tokens = prompt(length)
    flags = {**BOTH, "journal_dir": str(tmp_path), "chunked_prefill_size": 20}
    async with decoding(**flags) as decode, conducting(decode) as conductor:
        await whole(decode, conductor, spec("a", tokens, max_tokens=answer))
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == continuation(tokens, answer)
        told = conductor.prompts["a"]
        assert (told.local_tokens, told.computed_tokens) == (0, length)
        assert sum(chunk.tokens for chunk in told.chunks) == length
        await decode.rest()
        decode.service.executor.close()
    [file] = journal_files(tmp_path)
    assert rerun(file, check=True).difference is None


@pytest.mark.parametrize("length", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
async def test_the_same_prompt_again_is_cached(length: int) -> None:
    tokens = prompt(length)
    async with decoding(**BOTH) as decode, conducting(decode) as conductor:
        for name in "abc":
            await whole(decode, conductor, spec(name, tokens, max_tokens=BLOCK))
            await conductor.until(lambda name=name: name in conductor.reasons)  # type: ignore[misc]
            assert conductor.tokens[name] == continuation(tokens, BLOCK)
            held = 0 if name == "a" else min(length - 1, length // BLOCK * BLOCK)
            assert conductor.prompts[name].local_tokens == held
        await decode.rest()


@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 1}, {"preempt_every": 1}])
async def test_several_answers(length: int, flags: dict[str, Any]) -> None:
    tokens = prompt(length)
    async with decoding(**BOTH, **flags) as decode, conducting(decode) as conductor:
        await whole(decode, conductor, spec("a", tokens, max_tokens=BLOCK + 3, n=3))
        await conductor.until(lambda: len(conductor.reasons) == 3)
        firsts = first_tokens(digest_after(tokens), 3)
        for name, first in zip(("a", "a/1", "a/2"), firsts, strict=True):
            assert conductor.tokens[name] == [first, *continuation([*tokens, first], BLOCK + 2)]
        assert conductor.prompts.keys() == {"a"}
        await decode.rest()


async def test_several_answers_of_one_token_end_with_the_prompt() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding(**BOTH) as decode, conducting(decode) as conductor:
        await whole(decode, conductor, spec("a", tokens, max_tokens=1, n=2))
        await conductor.until(lambda: len(conductor.reasons) == 2)
        firsts = first_tokens(digest_after(tokens), 2)
        assert conductor.tokens == {"a": [firsts[0]], "a/1": [firsts[1]]}
        assert len(decode.engine.steps) == 1
        await decode.rest()


async def test_tokens_known_behind_the_first_ones() -> None:
    """A group that has gone on elsewhere: what is told begins behind the known tokens."""
    tokens = prompt(BLOCK + 2)
    async with decoding(**BOTH) as decode, conducting(decode) as conductor:
        firsts = first_tokens(digest_after(tokens), 2)
        answers = [[first, *continuation([*tokens, first], BLOCK + 4)] for first in firsts]
        asked = spec("a", tokens, max_tokens=BLOCK + 5, n=2)
        known = [answers[0][1:4], answers[1][1 : BLOCK + 2]]
        target = await reserve(decode, asked, computes_prompt=True)
        await conductor.compute("a", target, 2, known=known)
        await conductor.until(lambda: len(conductor.reasons) == 2)
        assert conductor.tokens == {"a": answers[0][4:], "a/1": answers[1][BLOCK + 2 :]}
        assert conductor.prompts.keys() == {"a"}
        await decode.rest()


@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 1}])
async def test_beams(flags: dict[str, Any]) -> None:
    tokens, ends, longest = prompt(BLOCK), list(range(8, 24)), BLOCK + 3

    def following(tokens: list[int]) -> list[tuple[int, float]]:
        found = most_likely(digest_after(tokens))
        return list(zip(found.tokens, found.log_probabilities, strict=True))

    [wanted, *_] = plain_search(tokens, 3, longest, SearchRules(0.5, False), following, ends)
    async with decoding(**BOTH, **flags) as decode, conducting(decode) as conductor:
        asked = spec("a", tokens, max_tokens=longest, ends=ends)
        asked.sampling.MergeFrom(kv_pb2.Sampling(beam_width=3, length_penalty=0.5))
        await whole(decode, conductor, asked)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert (conductor.tokens["a"], conductor.scores["a"]) == wanted
        assert conductor.prompts["a"].computed_tokens == BLOCK
        await decode.rest()


async def test_answers_go_on_between_the_chunks() -> None:
    """While an answer runs, each third step has a chunk, of the size that is due beside answers."""
    first, second = prompt(5), prompt(100, 3)
    flags = {**BOTH, "chunked_prefill_size": BLOCK, "num_continuous_decode_steps": 2}
    async with decoding(run_steps=4, **flags) as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold(after=3)
        await whole(decode, conductor, spec("a", first, max_tokens=60))
        await reached.wait()
        begun = len(decode.engine.steps)
        await whole(decode, conductor, spec("b", second, max_tokens=2))
        await decode.until(lambda: len(decode.service.core.planner.prompts) == 1)
        go.set()
        await conductor.until(lambda: conductor.reasons.keys() == {"a", "b"})
        assert conductor.tokens == {"a": continuation(first, 60), "b": continuation(second, 2)}
        steps = decode.engine.steps[begun:]
        sizes = [max(len(part.token_ids) // 4 for part in step.sequences) for step in steps]
        chunks = [at for at, size in enumerate(sizes) if size > 1]
        assert [sizes[at] for at in chunks] == [BLOCK] * 6 + [100 - 6 * BLOCK]
        assert {later - earlier for earlier, later in pairwise(chunks)} == {3}
        await decode.rest()


async def test_alone_a_chunk_is_as_large_as_a_step() -> None:
    tokens = prompt(300)
    async with decoding(**BOTH) as decode, conducting(decode) as conductor:
        await whole(decode, conductor, spec("a", tokens, max_tokens=1))
        await conductor.until(lambda: "a" in conductor.reasons)
        assert [len(step.sequences[0].token_ids) // 4 for step in decode.engine.steps] == [300]
        await decode.rest()


async def test_a_prompt_as_long_as_the_model_allows_gives_one_token() -> None:
    tokens = prompt(64)
    async with decoding(max_tokens=64, **BOTH) as decode, conducting(decode) as conductor:
        with pytest.raises(InvalidRequest, match="leaves no token"):
            await reserve(decode, spec("a", tokens))
        await whole(decode, conductor, spec("b", tokens))
        await conductor.until(lambda: "b" in conductor.reasons)
        assert conductor.tokens["b"] == continuation(tokens, 1)
        assert conductor.reasons["b"] == kv_pb2.FINISH_REASON_LENGTH
        await decode.rest()


@pytest.mark.parametrize("when", ["reserved", "queued", "computing"])
async def test_cancelled(when: str) -> None:
    async with decoding(**BOTH, max_num_seqs=1) as decode, conducting(decode) as conductor:
        reached, go = decode.engine.hold()
        await whole(decode, conductor, spec("a", prompt(5), max_tokens=3))
        await reached.wait()
        target = await reserve(decode, spec("b", prompt(40, 2)), computes_prompt=True)
        cancelled = "b"
        if when == "queued":
            await conductor.compute("b", target)
        if when == "computing":
            cancelled = "a"
            await conductor.compute("b", target)
            [target] = [await conductor_target(decode, "a")]
        await conductor.cancel(cancelled, target)
        await decode.until(lambda: all(live.request_id != cancelled or live.ending for live in decode.service.executor))
        go.set()
        await conductor.until(lambda: cancelled in conductor.outcomes)
        if when == "computing":
            await conductor.until(lambda: "b" in conductor.reasons)
            assert conductor.tokens["b"] == continuation(prompt(40, 2), 4)
        await decode.rest()


async def conductor_target(decode: Decode, request_id: str) -> kv_pb2.TransferTarget:
    [live] = [live for live in decode.service.executor if live.request_id == request_id]
    transfer = live.transfer
    return kv_pb2.TransferTarget(transfer_id=transfer.transfer_id, generation=transfer.generation)


class TestRefused:
    async def test_where_the_instance_is_plain_decode(self) -> None:
        async with decoding() as decode:
            with pytest.raises(InvalidRequest, match="computes no whole prompts") as refused:
                await reserve(decode, spec("a", prompt(5)), computes_prompt=True)
            assert refused.value.field == "computes_prompt"

    async def test_a_queue_that_is_longer_than_expected(self) -> None:
        async with decoding(**BOTH) as decode, conducting(decode) as conductor:
            target = await reserve(decode, spec("a", prompt(200)), computes_prompt=True, max_queue_s=0.0)
            load = decode.service.load()
            assert (load.queued_tokens, load.taken) == (200, 1)
            assert load.drain_s == pytest.approx(0.2)
            with pytest.raises(Overloaded) as refused:
                await reserve(decode, spec("b", prompt(200, 1)), computes_prompt=True, max_queue_s=0.1)
            assert refused.value.reason == "stale"
            await conductor.compute("a", target)
            await conductor.until(lambda: "a" in conductor.reasons)
            assert (decode.service.load().queued_tokens, decode.service.load().drain_s) == (0, 0.0)

    @pytest.mark.parametrize(
        ("fields", "why"),
        [({"delay_s": -1.0}, "delay_s: must"), ({"held_blocks": [1]}, "held_blocks: 1 numbers for 0 kvstores")],
    )
    async def test_wrong_fields(self, fields: dict[str, Any], why: str) -> None:
        async with decoding(**BOTH) as decode, conducting(decode) as conductor:
            target = await whole(decode, conductor, spec("a", prompt(5)), **fields)
            await conductor.until(lambda: "a" in conductor.failed)
            assert why in conductor.failed["a"]
            await conductor.cancel("a", target)
            await decode.rest()
