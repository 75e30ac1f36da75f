"""What is chosen of a step's last hidden states, and of the further steps of its run."""

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.footprint import LOGIT_ROWS
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.stage import StageModel
from moonpool.engine.step_sampler import StepOutput, StepSampler
from moonpool.engine.structured_output import PendingMasks, TokenMasks

VOCAB = 256


class Counted:
    """A last stage whose hidden states are its logits.

    Attributes:
        rows: of logits that memory was taken for.
    """

    def __init__(self) -> None:
        self.config, self.device, self.rows = SimpleNamespace(vocab_size=VOCAB), torch.device("cpu"), 0

    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        self.rows += 0 if out is not None else len(rows)
        return rows.clone() if out is None else out.copy_(rows)


class Chosen:
    """Steps of one token of each sequence."""

    def __init__(self, *specs: SampleSpec) -> None:
        self.model = Counted()
        shares = tuple(SequenceStep(bytes(4), 0, (block,), spec) for block, spec in enumerate(specs))
        self.batch = PackedBatch.build([(share.token_ids, share.start, share.block_table) for share in shares], 16)
        self.choosing = StepSampler(cast("StageModel", self.model), Step(1, shares, steps=3), ())

    def choose(self, *rows: dict[int, float], masks: PendingMasks | None = None) -> StepOutput:
        """Logits of each row, 0 but for some tokens."""
        logits = torch.zeros(len(rows), VOCAB)
        for row, values in enumerate(rows):
            for token, value in values.items():
                logits[row, token] = value
        return self.choosing.choose(logits, self.batch, masks)


def test_logits_of_a_run_of_many_sequences_are_held_some_rows_at_a_time() -> None:
    count = 2 * LOGIT_ROWS + 3
    case = Chosen(*[SampleSpec()] * count)
    for step in range(3):
        tokens = [(row + step) % VOCAB for row in range(count)]
        assert case.choose(*({token: 1.0} for token in tokens)).sampled == tokens
        case.choosing.advance(tokens)
    assert case.model.rows == LOGIT_ROWS


def test_a_forced_token_is_chosen_whatever_the_model_and_the_options_say() -> None:
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.1, min_p=0.5, seed=3, logprobs=1),
        SamplingParams(temperature=0.0, logit_bias={5: -100.0}, repetition_penalty=2.0),
    ):
        for token in (0, 5, VOCAB - 1):
            forced = SampleSpec(params, forced=token, samples=2, history=bytes(4))
            case = Chosen(SampleSpec(SamplingParams(temperature=0.0)), forced)
            output = case.choose({9: 1.0}, {7: 50.0})
            assert output.sampled == [9, token]
            assert output.several[1].tokens == (token, token)


def test_a_forced_token_beside_a_mask() -> None:
    masks = PendingMasks(lambda: TokenMasks({0: memoryview(bytes([1 << 3]) + bytes(31))}))
    case = Chosen(SampleSpec(SamplingParams(temperature=0.0)), SampleSpec(SamplingParams(temperature=0.0), forced=4))
    assert case.choose({9: 1.0}, {7: 5.0}, masks=masks).sampled == [3, 4]


def test_a_sequence_goes_on_with_its_own_token_beside_a_beam() -> None:
    beam = SampleSpec(SamplingParams(beam_width=1), best=2)
    case = Chosen(beam, SampleSpec(SamplingParams(temperature=0.0, repetition_penalty=2.0), history=bytes(4)))
    logits = {7: 1.0, 9: 0.9}
    assert case.choose({5: 1.0}, logits).sampled == [5, 7]
    case.choosing.advance([5, 7])
    assert case.choose({5: 1.0}, logits).sampled == [5, 9]


def test_masks_are_made_when_the_logits_are_there_and_waiting_for_grammars_is_told() -> None:
    def make() -> TokenMasks:
        assert case.model.rows == 2
        return TokenMasks({1: memoryview(bytes([0, 0, 1]) + bytes(VOCAB // 8 - 3))}, waited_ns=5)

    case = Chosen(SampleSpec(), SampleSpec())
    found = case.choose({5: 1.0}, {7: 1.0}, masks=PendingMasks(make))
    assert found.sampled == [5, 16]
    assert found.awaited_ns == 5
    assert not case.choose({5: 1.0}, {7: 1.0}).awaited_ns
