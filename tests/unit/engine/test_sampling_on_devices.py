"""What is sampled in torch on a device whose order is hostile is what the plain CPU samples."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.messages import StageDone
from moonpool.engine.platforms.base import Device
from moonpool.engine.platforms.staged import StagedDevice
from tests.unit.engine.stages import PROMPT, ids, stages

WAYS: list[dict[str, Any]] = [
    {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_k": 40, "min_p": 0.01, "logit_bias": {5: 3.0, 9: -3.0}},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"temperature": 0.9},
]


def story(checkpoint: Path, device: Device | None) -> list[tuple[tuple[int | None, ...], Mapping[int, str]]]:
    """A prompt of each, and a run of eight steps: what was sampled in each step."""
    specs = []
    for number, way in enumerate(WAYS):
        params = SamplingParams(**way)
        history = ids(*PROMPT[:12], 7) if params.penalised else None
        specs.append(SampleSpec(params, seed=40 + number, history=history, prompt_tokens=12, banned=(3,)))
    prompts = [SequenceStep(ids(*PROMPT[:12]), 0, (2 * row, 2 * row + 1), spec) for row, spec in enumerate(specs)]
    going_on = [SequenceStep(ids(7), 12, (2 * row, 2 * row + 1), spec) for row, spec in enumerate(specs)]
    with stages(checkpoint, 1, device) as pipeline:
        pipeline.run(Step(1, tuple(prompts)))
        pipeline.run(Step(2, tuple(going_on), steps=8))
        pipeline.runners[0].close()
        told = [event for event in pipeline.events if isinstance(event, StageDone)]
        done = list(chain.from_iterable((*report.earlier, report) for report in told))
        assert not pipeline.failures
        return [(report.sampled, report.failed) for report in done]


@pytest.mark.parametrize("seed", range(4))
def test_a_hostile_order_samples_the_same(seed: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    expected = story(checkpoint, None)
    assert len(expected) == 9
    assert story(checkpoint, StagedDevice(seed)) == expected
