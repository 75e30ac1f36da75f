"""Engines alone and at once: what they are given, how long each goes on, and what stands beside what."""

import asyncio

import pytest

from benchmarks.lending_engines import (
    BLOCK,
    BLOCKS,
    CHUNK,
    CONTEXT,
    DECODE,
    PREFILL,
    PROMPT,
    RUN,
    Driven,
    Kind,
    Work,
    comparisons,
    rates,
    threads_compared,
)
from moonpool.base.errors import Unavailable
from moonpool.base.scheduling.steps import Step, StepResult
from tests.unit.fakes.engine import FakeEngine

ONE, OTHER = Kind(0), Kind(0, 1)


class Held(FakeEngine):
    """Counts its steps; each waits until it may go on."""

    def __init__(self) -> None:
        super().__init__(1)
        self.taken: list[int] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def run(self, step: Step, **_: object) -> StepResult:
        self.taken.append(step.step_id)
        await asyncio.sleep(0)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return StepResult((7,), False, 0, 1)


def test_a_prompt_is_computed_in_chunks_and_gives_one_token() -> None:
    steps = list(PREFILL.steps())
    parts = [it for step in steps for it in step.sequences]
    assert [(it.start, len(it.token_ids) // 4) for it in parts] == [(at, CHUNK) for at in range(0, PROMPT, CHUNK)]
    assert [it.sample is not None for it in parts] == [False] * (len(parts) - 1) + [True]
    assert PREFILL.tokens == PROMPT
    assert {len(it.block_table) * BLOCK for it in parts} == {PROMPT}


@pytest.mark.parametrize("work", DECODE)
def test_sequences_decode_in_one_run_each_in_blocks_of_its_own(work: Work) -> None:
    [step] = work.steps()
    blocks = [block for it in step.sequences for block in it.block_table]
    assert (len(step.sequences), step.steps, work.tokens) == (work.batch, RUN, work.batch * RUN)
    assert len(blocks) == len(set(blocks)) <= BLOCKS
    assert {it.start for it in step.sequences} == {CONTEXT - 1}
    assert all(len(it.block_table) * BLOCK >= CONTEXT + RUN for it in step.sequences)


async def test_an_engine_goes_on_until_the_other_was_counted() -> None:
    """Else the other would have its cores in its last moments."""
    engines = {ONE: Driven(Held()), OTHER: Driven(Held())}
    quick, slow = (it.engine for it in engines.values())
    assert isinstance(quick, Held)
    assert isinstance(slow, Held)
    quick.go.set()
    async with asyncio.timeout(60):
        counting = asyncio.ensure_future(rates(engines, ((ONE, DECODE[0]), (OTHER, DECODE[0])), 0.0))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(quick.taken) > 5
        assert len(slow.taken) == 1
        slow.go.set()
        found = await counting
    assert quick.taken == list(range(1, len(quick.taken) + 1))
    assert found[0] > found[1] > 0.0, "a step that is not counted adds nothing"


async def test_an_engine_that_dies_ends_the_measurement() -> None:
    engines = {ONE: Driven(Held()), OTHER: Driven(Held())}
    for number, driven in enumerate(engines.values()):
        assert isinstance(driven.engine, Held)
        driven.engine.go.set()
        driven.engine.error = Unavailable("killed") if number else None
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(rates(engines, ((ONE, PREFILL), (OTHER, PREFILL)), 0.0), 60)
    assert failed.group_contains(Unavailable)


def test_one_that_lends_stands_beside_all_cores_and_two_beside_halves() -> None:
    alone, together = comparisons(4)[:3], comparisons(4)[3:]
    assert [it.ours for it in alone] == [((ONE, work),) for work in (PREFILL, *DECODE)]
    assert [it.theirs for it in alone] == [((Kind(4), work),) for work in (PREFILL, *DECODE)]
    assert {it.target for it in (*alone, *together)} == {0.95}
    for it in together:
        assert [kind for kind, _ in it.ours] == [ONE, OTHER]
        assert [kind for kind, _ in it.theirs] == [Kind(2), Kind(2, 1)]
        assert [work for _, work in it.ours] == [work for _, work in it.theirs]
    for it in threads_compared():
        assert (it.target, it.ours[0][0], it.theirs[0][0]) == (1.0, Kind(2), Kind(1))


def test_rates_of_equal_work_are_added_up_and_those_of_other_work_as_shares() -> None:
    *_, prefill, _, mixed = comparisons(2)
    row = prefill.row("small", [([60.0, 40.0], [50.0, 50.0]), ([80.0, 40.0], [50.0, 50.0])])
    assert (row.value, row.unit, row.limit_value, row.ratio, row.met) == (110.0, "tokens/s", 100.0, 1.1, True)
    assert row.name == f"small, prefill, {PROMPT} tokens, two engines busy, cores lent"
    row = mixed.row("small", [([900.0, 10.0], [1000.0, 20.0])])
    assert (row.value, row.limit_value, row.ratio) == pytest.approx((1.4, 2.0, 0.7))
    assert not row.met
