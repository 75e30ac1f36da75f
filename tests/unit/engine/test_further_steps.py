"""Runs on one stage: what their further steps compute and choose, and how they end."""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.kv.keys import slice_hash
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.kernels.native import library
from moonpool.engine.messages import StageDone
from moonpool.engine.models.native_loop import RunResult
from moonpool.engine.sampling.sampler import NOT_FINITE
from moonpool.engine.structured_output import MaskBuilder, MaskRequest, PendingMasks, TokenMasks
from tests.layouts import one_tensor
from tests.unit.engine.stages import GREEDY, PROMPT, ids, stages, whole

NATIVE = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")


def test_a_run_computes_what_its_steps_compute_one_by_one(checkpoint: Path) -> None:
    """It ends with its last step, with an end token, or where it is cut."""
    with stages(checkpoint, 1) as single, stages(checkpoint, 1) as several:
        single.run(whole())
        several.run(whole())
        tokens, share = [7], SequenceStep(ids(7), 40, (4, 1, 6), GREEDY)
        for number in range(2, 7):
            [token] = single.run(Step(number, (share,)))[-1].sampled
            assert token is not None
            tokens.append(token)
            share = SequenceStep(ids(token), 39 + number, (4, 1, 6), GREEDY)
        share = SequenceStep(ids(7), 40, (4, 1, 6), GREEDY)
        done = several.run(Step(2, (share,), steps=5))[1:]
        assert [(report.step_id, report.sampled, report.over) for report in done] == [
            (2, (token,), token is tokens[-1]) for token in tokens[1:]
        ]
        told = several.run(Step(2, (share,), patient=True, steps=5))[6:]
        done = [report for last in told for report in (*last.earlier, last)]
        assert [(report.sampled, report.over) for report in done] == [
            ((token,), token is tokens[-1]) for token in tokens[1:]
        ]
        assert all(stage_alone.end_ns <= next_.start_ns < next_.end_ns for stage_alone, next_ in pairwise(done))
        del several.events[-len(told) :]
        ending = replace(share, end_token_ids=frozenset(tokens[3:4]))
        stop = tokens.index(tokens[3]) if tokens[3] in tokens[1:3] else 3
        assert [report.over for report in several.run(Step(3, (ending,), steps=5))[6:]] == [False] * (stop - 1) + [True]
        several.gates[0].stop_run(4)
        assert several.run(Step(4, (share,), steps=5))[-1].over
        assert not len(several.gates[0])


def test_a_run_seals_the_blocks_that_it_fills_and_ends_when_it_is_aborted(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as stage_alone:
        stage_alone.run(whole())
        share = SequenceStep(ids(7), 40, (4, 1, 6, 2), GREEDY)
        stage_alone.run(Step(2, (share,), steps=12))
        for layer in range(stage_alone.pool.layout.layers):
            data, value = stage_alone.pool.read(layer, 6)
            assert value == slice_hash(data)
            assert stage_alone.pool.read(layer, 2)[1] == 0
        assert stage_alone.runners[0].run(Step(3, (share,), steps=12))
        assert stage_alone.runners[0].go_on()
        stage_alone.gates[0].abort(3)
        assert not stage_alone.runners[0].go_on()
        assert [event.aborted for event in stage_alone.events[-3:] if isinstance(event, StageDone)] == [
            False,
            False,
            True,
        ]
        assert not len(stage_alone.gates[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_with_a_format_gives_the_tokens_of_plain_forward_passes_with_its_masks(
    temperature: float, checkpoint: Path
) -> None:
    how = SamplingParams(temperature=temperature, response_format="regex", grammar="[a-z]{30}")

    def step(step_id: int, tokens: list[int], spec: SampleSpec, steps: int = 1) -> Step:
        return Step(step_id, (SequenceStep(ids(*PROMPT, *tokens), 0, (4, 1, 6), spec),), steps=steps)

    with stages(checkpoint, 1) as stage_alone:
        stage_alone.runners[0].masks = MaskBuilder(lambda: Tokenizer.load(checkpoint), 512, (1,))
        tokens = [report.sampled[0] or 0 for report in stage_alone.run(step(1, [], SampleSpec(how), steps=6))]
        assert re.fullmatch("[a-z]+", Tokenizer.load(checkpoint).decode(tokens))
        for at, token in enumerate(tokens):
            stage_alone.runners[0].masks.close()
            stage_alone.runners[0].masks = MaskBuilder(lambda: Tokenizer.load(checkpoint), 512, (1,))
            alone = step(2 + at, tokens[:at], SampleSpec(how, position=at, answer=ids(*tokens[:at])))
            assert stage_alone.run(alone)[-1].sampled == (token,)
        assert stage_alone.run(step(9, [], GREEDY))[-1].sampled[0] not in tokens
        stage_alone.runners[0].close()


class Ambiguous(MaskBuilder):
    """One token may follow in the first sequence; in the run's third step there is no mask for it."""

    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("no tokenizer is needed"), 512, ())
        self._bits = bytearray(64)
        self._steps_made = 0

    def begin(self, wanted: Sequence[MaskRequest], *, alone: bool = False) -> PendingMasks:
        assert [request.index for request in wanted] == [0]
        return self.advance(())

    def advance(self, tokens: Sequence[int]) -> PendingMasks:
        self._steps_made += 1
        self._bits[:] = (1 << 7 + self._steps_made).to_bytes(64, "little")
        failed = {0: "too ambiguous"} if self._steps_made == 3 else {}
        return PendingMasks(lambda: TokenMasks({0: memoryview(self._bits)}, failed))


class Uncompiled(MaskBuilder):
    """Its first grammar is not compiled: when it is asked for masks, it notes whether some KV has been written."""

    def __init__(self, written: Callable[[], bool]) -> None:
        super().__init__(lambda: pytest.fail("no tokenizer is needed"), 512, ())
        self.seen: list[bool] = []
        self._written = written

    def begin(self, wanted: Sequence[MaskRequest], *, alone: bool = False) -> PendingMasks:
        return PendingMasks(self._make, [Future()])

    def _make(self) -> TokenMasks:
        self.seen.append(self._written())
        return TokenMasks()


def test_a_grammar_is_waited_for_behind_the_layers_of_a_runs_first_step(checkpoint: Path) -> None:
    formed = SampleSpec(SamplingParams(temperature=0.0, response_format="regex", grammar="a"))
    with stages(checkpoint, 1) as stage_alone:
        stage_alone.run(whole())
        block = one_tensor(stage_alone.runners[0].platform.memory.kv)[:, 6]
        block.zero_()
        with closing(Uncompiled(lambda: bool(block.any()))) as masks:
            stage_alone.runners[0].masks = masks
            stage_alone.runners[0].run(Step(2, (SequenceStep(ids(8), 40, (4, 1, 6), formed),), steps=6))
            assert masks.seen == [True]


@pytest.mark.parametrize("patient", [False, True])
def test_a_sequence_without_a_mask_ends_a_run_and_the_others_have_their_tokens(patient: bool, checkpoint: Path) -> None:
    formed = SampleSpec(SamplingParams(temperature=0.0, response_format="regex", grammar="a"))
    with stages(checkpoint, 1) as stage_alone, closing(Ambiguous()) as masks:
        stage_alone.run(whole())
        del stage_alone.events[:]
        stage_alone.runners[0].masks = masks
        first, second = (SequenceStep(ids(8), 40, (4, 1, block), spec) for block, spec in ((6, formed), (2, GREEDY)))
        told = stage_alone.run(Step(2, (first, second), patient=patient, steps=6))
        done = [report for last in told for report in (*last.earlier, last)]
        del stage_alone.events[:]
        stage_alone.runners[0].masks = None
        expected = [report.sampled[0] for report in stage_alone.run(Step(3, (second,), steps=3))]
    assert [report.sampled for report in done] == list(zip((8, 9, None), expected, strict=True))
    assert [report.failed for report in done] == [{}, {}, {0: "too ambiguous"}]
    assert [report.over for report in done] == [False, False, True]


@pytest.mark.parametrize(
    "way", [{"logprobs": 2}, {"repetition_penalty": 1.5, "frequency_penalty": 1.0}, {"temperature": 1.0, "top_p": 0.9}]
)
def test_a_run_chooses_as_its_steps_do_one_by_one(way: dict[str, Any], checkpoint: Path) -> None:
    params = SamplingParams(**{"temperature": 0.0} | way)
    first = SampleSpec(params, seed=3, history=ids(*PROMPT, 7) if params.penalised else None, prompt_tokens=len(PROMPT))
    with stages(checkpoint, 1) as single, stages(checkpoint, 1) as several:
        single.run(whole())
        several.run(whole())
        token, spec, expected = 7, first, []
        for number in range(5):
            last = single.run(Step(2 + number, (SequenceStep(ids(token), 40 + number, (4, 1, 6), spec),)))[-1]
            expected.append((last.sampled, last.logprobs))
            token = last.sampled[0] or 0
            spec = spec.after(token)
        run = Step(2, (SequenceStep(ids(7), 40, (4, 1, 6), first),), patient=True, steps=5)
        done = [report for told in several.run(run)[1:] for report in (*told.earlier, told)]
        assert [(report.sampled, report.logprobs) for report in done] == expected


def test_a_token_that_would_end_another_answer_ends_no_run(checkpoint: Path) -> None:
    def told(step: Step) -> list[tuple[int | None, ...]]:
        done = [report for last in stage_alone.run(step) for report in (*last.earlier, last)]
        del stage_alone.events[:]
        return [report.sampled for report in done]

    with stages(checkpoint, 1) as stage_alone:
        told(whole())
        first, second = (SequenceStep(ids(token), 40, (4, 1, block), GREEDY) for token, block in ((7, 6), (8, 2)))
        expected = told(Step(2, (first, second), steps=5))
        others = {pair[1] for pair in expected}
        ends = frozenset(pair[0] for pair in expected if pair[0] is not None) - others
        assert ends
        assert told(Step(3, (first, replace(second, end_token_ids=ends)), patient=True, steps=5)) == expected


@NATIVE
def test_a_sequence_whose_logits_are_not_finite_ends_a_run_and_the_others_have_their_tokens(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as stage_alone:
        stage_alone.run(whole())
        shares = tuple(SequenceStep(ids(token), 40, (4, 1, block), GREEDY) for token, block in ((7, 6), (8, 2)))
        expected = [report.sampled for report in stage_alone.run(Step(2, shares, steps=2))[1:]]
        del stage_alone.events[:]
        assert stage_alone.runners[0].run(Step(3, shares, steps=6))
        one_tensor(stage_alone.runners[0].platform.memory.kv)[:, 6] = torch.nan
        assert not stage_alone.runners[0].go_on()
        first, told = [event for event in stage_alone.events if isinstance(event, StageDone)]
        assert (first.sampled, told.sampled) == (expected[0], (None, expected[1][1]))
        assert (told.over, told.failed) == (True, {0: NOT_FINITE})


class Halted:
    """The rest of a run whose next call does two steps and is given up in the third."""

    samples, failed = True, False

    def sample_by(self, attach: object, ends: object) -> None: ...

    def go_on(self, most: int, until_ns: int) -> RunResult:
        assert most > 2
        return RunResult(2, stopped=True, filled=[])

    def tokens(self, steps: int) -> list[tuple[list[int], int]]:
        return [([5 + step], time.monotonic_ns()) for step in range(steps)]


@NATIVE
def test_steps_before_the_one_that_is_aborted_are_told_and_that_one_has_no_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stages(checkpoint, 1) as stage_alone:
        [runner] = stage_alone.runners
        monkeypatch.setattr(runner.model, "native_run", lambda *_, **__: Halted())
        assert runner.run(Step(1, (SequenceStep(ids(7), 0, (4,), GREEDY),), patient=True, steps=6))
        assert not runner.go_on()
        [told] = [event for event in stage_alone.events if isinstance(event, StageDone)]
        assert [(report.sampled, report.aborted) for report in told.earlier[1:]] == [((5,), False), ((6,), False)]
        assert (told.sampled, told.aborted, told.over) == ((), True, True)
