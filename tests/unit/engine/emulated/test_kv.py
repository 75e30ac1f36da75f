"""Emulated KV and tokens: exact bytes, independent of placement, and wrong KV fails the engine."""

import asyncio
import pickle
from array import array
from dataclasses import replace

import pytest

from moonpool.base.errors import Unavailable
from moonpool.base.kv.keys import BlockKey, block_keys, chain_root
from moonpool.base.kv.media import MediaItem
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.emulated.kv import EmulatedKV, continuation
from tests.unit.engine.emulated.rig import (
    BT,
    LAYERS,
    PROFILE,
    PROMPT,
    ROOT,
    VOCAB,
    engine_of,
    history,
    part,
    slices,
    spec_of,
)


def test_content_is_what_it_was() -> None:
    """Stored emulated KV outlives a release; these bytes may change with the namespace only."""
    kv = EmulatedKV(PROFILE.layout(BT))
    base = kv.base(bytes(32), array("i", [1, 2]))
    # The blake3 hash of 32 zero bytes is 2ada83c1819a5372 dae1238fc1ded123 ...
    assert base.hex() == "2bda83c1819a5372d8e1238fc1ded123"
    view = memoryview(bytearray(kv.layout.slice_bytes(0)))
    kv.write(view, 1, base, first_slot=3)
    assert bytes(view[24:40]).hex() == bytes((x * 5 + 146) % 256 for x in base).hex()
    assert bytes(view[128 + 24 : 128 + 40]) == bytes((x * 7 + 219) % 256 for x in base)
    assert kv.wrong_slot(view, 1, base, 3) is None
    assert kv.wrong_slot(view, 2, base, 3) == 3
    view[128 + 39] ^= 1
    assert kv.wrong_slot(view, 1, base, 3) == 4
    assert sum(view[40:128]) == 0


def test_answer_depends_on_the_whole_history_alone() -> None:
    assert continuation(range(10), 5, VOCAB, {1}) == [320, 938, 234, 751, 462]  # tests elsewhere rely on it
    answer = continuation(PROMPT, 8, VOCAB, {1})
    assert answer == [*answer[:3], *continuation([*PROMPT, *answer[:3]], 5, VOCAB, {1})]
    assert answer != continuation([PROMPT[0] + 1, *PROMPT[1:]], 8, VOCAB, {1})
    assert set(continuation(PROMPT, 200, 3, {1})) == {0, 2}
    assert continuation(PROMPT, 8, VOCAB, seed=5) != answer


async def test_pictures_make_a_difference_from_their_first_token_on() -> None:
    answers = list[tuple[int | None, ...]]()
    async with engine_of() as engine:
        for number, digest in enumerate((bytes(32), b"a" * 32, b"a" * 32)):
            seen = history(PROMPT)
            seen.media = [MediaItem(20, 30, digest)]
            seen.keys = block_keys(ROOT, PROMPT, BT, seen.media)
            table = (3 * number, 3 * number + 1, 3 * number + 2)
            await engine.run(Step(2 * number, (part(seen, 0, 24, table),)))  # a chunk ends within the picture
            answers.append((await engine.run(Step(2 * number + 1, (part(seen, 24, 40, table, sample=True),)))).sampled)
        assert answers[0] != answers[1] == answers[2]
        first, second, third = (slices(engine, (block,)) for block in (0, 3, 6))
        assert first == second == third
        first, second, third = (slices(engine, (block,)) for block in (1, 4, 7))
        assert first != second == third
        assert [kv[: 4 * 8] for kv in first] == [kv[: 4 * 8] for kv in second], "tokens before the picture are alike"
        wrong = history(PROMPT)
        wrong.media = [MediaItem(20, 30, bytes(32))]
        with pytest.raises(Unavailable, match="not its tokens'"):
            await engine.run(Step(9, (part(wrong, 39, 40, (0, 1, 2), sample=True),)))


async def test_chunks_and_batches_make_no_difference() -> None:
    async with engine_of() as engine:
        whole, parts = history(PROMPT), history(PROMPT)
        await engine.run(Step(1, (part(whole, 0, 40, (0, 1, 2), sample=True),)))
        await engine.run(Step(2, (part(history([8] * 20), 0, 20, (9, 10)), part(parts, 0, 16, (3,)))))
        last = await engine.run(Step(3, (part(parts, 16, 40, (3, 4, 5), sample=True),)))
        for layer in range(LAYERS):
            for a, b, slots in ((0, 3, 16), (1, 4, 16), (2, 5, 8)):
                for plane in range(2):
                    span = slice(plane * 128, plane * 128 + slots * 8)
                    assert engine.pool.slice(layer, a)[span] == engine.pool.slice(layer, b)[span]
        assert last.sampled == tuple(continuation(PROMPT, 1, VOCAB, {1}))


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("byte", [0, 8 * 15, 128, 255])
async def test_a_wrong_byte_in_the_prefix_fails_the_engine(layer: int, byte: int) -> None:
    async with engine_of() as engine:
        await engine.run(Step(1, (part(history(PROMPT), 0, 32, (0, 1)),)))
        engine.pool.slice(layer, 1)[byte] ^= 4
        with pytest.raises(Unavailable, match=rf"wrong KV in step 2.*block 1 of the pool.*layer {layer}, slot"):
            await engine.run(Step(2, (part(history(PROMPT), 32, 40, (0, 1, 2)),)))
        assert "wrong KV" in engine.failed.result()
        with pytest.raises(Unavailable, match="wrong KV"):
            await engine.run(Step(3, (part(history(PROMPT), 0, 1, (0,)),)))


@pytest.mark.parametrize("right", [True, False])
async def test_of_a_full_hit_the_last_token_is_looked_at_and_not_written(right: bool) -> None:
    prompt = PROMPT[:32]
    async with engine_of() as engine:
        await engine.run(Step(1, (part(history(prompt), 0, 32, (0, 1)),)))
        if not right:
            engine.pool.slice(2, 1)[8 * 15] ^= 4
        before = slices(engine, (0, 1))
        last = replace(part(history(prompt), 31, 32, (0, 1), sample=True), full_hit=True)
        if right:
            assert (await engine.run(Step(2, (last,)))).sampled == tuple(continuation(prompt, 1, VOCAB, {1}))
        else:
            with pytest.raises(Unavailable, match=r"wrong KV in step 2.*layer 2, slot 15"):
                await engine.run(Step(2, (last,)))
        assert slices(engine, (0, 1)) == before


async def test_kv_of_others_is_wrong() -> None:
    """Of another tenant, of another history, and of another block of the same sequence."""
    wrong = [
        (history(PROMPT, BlockKey(chain_root(bytes(32), "other"))), (0, 1, 2)),
        (history([6, *PROMPT[1:]]), (0, 1, 2)),
        (history(PROMPT), (1, 0, 2)),
    ]
    for of, table in wrong:
        async with engine_of() as engine:
            await engine.run(Step(1, (part(history(PROMPT), 0, 32, (0, 1)),)))
            with pytest.raises(Unavailable, match="does not hold its tokens' KV"):
                await engine.run(Step(2, (part(of, 32, 40, table),)))


async def test_a_block_overwritten_under_a_running_sequence_is_noticed() -> None:
    async with engine_of(spec_of(decode=True, scale=1e6)) as engine:
        of = history(PROMPT)
        await engine.run(Step(0, (part(of, 0, 40, (0, 1, 2)),)))
        engine.pool.slice(2, 1)[:] = bytes(256)
        found = []
        for number in range(1, 2 * LAYERS + 1):  # every slice of the two full blocks has its turn
            of.token_ids.append(9)
            end = len(of.token_ids)
            step = Step(number, (part(of, end - 1, end, (0, 1, 2, 3)[: -(-end // BT)]),))
            found.append(await asyncio.gather(engine.run(step), return_exceptions=True))
        results = [result for (result,) in found]
        assert [isinstance(result, Unavailable) for result in results] == [False] * 5 + [True] * 3
        assert "block 1 of the pool" in engine.failed.result()


async def test_a_step_that_contradicts_its_history_fails() -> None:
    other = history(PROMPT)
    other.keys = [*other.keys[:1], BlockKey(bytes(32))]
    cases: list[tuple[SequenceStep, str]] = [
        (replace(part(history(PROMPT), 0, 16, (0,)), history=None), "does not say"),
        (replace(part(history(PROMPT), 0, 16, (0,)), token_ids=bytes(64)), "are not those"),
        (part(other, 32, 40, (0, 1, 2)), "has a key that is not its tokens'"),
    ]
    for step, message in cases:
        async with engine_of() as engine:
            with pytest.raises(Unavailable, match=message):
                await engine.run(Step(1, (step,)))


async def test_decode_continues_from_bytes_of_another_engine() -> None:
    answer = continuation(PROMPT, 30, VOCAB, {1})
    async with engine_of() as prefill, engine_of(spec_of(decode=True, scale=1e6)) as decode:
        await prefill.run(Step(1, (part(history(PROMPT), 0, 40, (0, 1, 2)),)))
        for layer in range(LAYERS):
            for a, b in ((0, 8), (1, 6), (2, 4)):
                decode.pool.slice(layer, b)[:] = prefill.pool.slice(layer, a)
        of, table = history(PROMPT), (8, 6, 4, 2, 0)
        for number in range(29):
            of.token_ids.append(answer[number])
            end = len(of.token_ids)
            step = Step(number, (part(of, end - 1, end, table[: -(-end // BT)], sample=True),))
            assert (await decode.run(step)).sampled == (answer[number + 1],)
        # What decode has filled is what a prefill of prompt and answer would have made.
        await prefill.run(Step(2, (part(history([*PROMPT, *answer[:24]]), 0, 64, (5, 6, 7, 9)),)))
        assert slices(prefill, (7, 9)) == slices(decode, (4, 2))


async def test_after_an_abort_the_prefix_is_checked_again() -> None:
    async with engine_of() as engine:
        of = history(PROMPT)
        await engine.run(Step(1, (part(of, 0, 16, (0,)),)))
        engine.abort(2)
        await engine.run(Step(2, (part(of, 16, 32, (0, 1)),)))
        engine.pool.slice(3, 0)[0] ^= 1
        with pytest.raises(Unavailable, match="block 0 of the pool"):
            await engine.run(Step(3, (part(of, 16, 32, (0, 1)),)))


def test_history_stays_in_its_process() -> None:
    step = Step(1, (part(history(PROMPT), 0, 16, (0,)),))
    assert pickle.loads(pickle.dumps(step)) == step
    assert pickle.loads(pickle.dumps(step)).sequences[0].history is None
