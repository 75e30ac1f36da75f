"""A one-process stage: a model with random weights, its KV, and the loop by which services run steps."""

from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import StageDone, StageEvent
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.stage import StageModel
from moonpool.engine.pipeline import NoLinks
from moonpool.engine.platforms.base import Device
from moonpool.engine.platforms.registry import DeviceName
from moonpool.engine.platforms.stage_platform import StagePlatform, open_device, stage_platform
from moonpool.engine.prompt_graphs import PromptGraphs
from tools.gpu_check.serving import Served, checkpoint
from tools.gpu_check.where import Figures, Where, expect

BLOCK = 64


@dataclass
class Stage:
    """What runs steps.

    Attributes:
        device: computes.
        model: all layers.
        place: the device with the KV.
        longest: tokens of a sequence.
        vocab: tokens to draw from.
    """

    device: Device
    model: StageModel
    place: StagePlatform
    longest: int
    vocab: int
    done: list[StageDone] = field(default_factory=list)
    _next: int = 1

    def runner(self) -> StageRunner:
        """Return a loop over steps without graphs."""
        return StageRunner(0, self.model, self.place, NoLinks(), KVGates(), self._emit, 60.0)

    @in_inference_mode
    def runner_of_graphs(self, most_rows: int, prompt_tokens: int = 0) -> StageRunner:
        """Return a loop over steps, with captured graphs for decode steps up to `most_rows` sequences.

        `prompt_tokens`: of the largest step of prompts whose layers are captured, too; 0: none is.

        Raises:
            CheckError: a graph could not be captured.
        """
        found, cache = self.runner(), GraphCache(self.longest, most_rows=most_rows)
        found.graphs = DecodeGraphs(self.device, self.model, self.place.memory, cache, self.longest)
        found.graphs.capture(self.place.stream, print)
        expect(not cache.stopped, f"graphs: {cache.stopped}")
        if prompt_tokens:
            prompts = PromptGraphs(self.device, self.model, self.place.memory, self.longest, prompt_tokens)
            prompts.capture(self.place.stream, print)
            expect(not prompts.not_captured, f"graphs: {prompts.not_captured}")
            found.prompt_graphs = prompts
        return found

    def _emit(self, event: StageEvent) -> None:
        if isinstance(event, StageDone):
            self.done.append(event)

    def decode_steps(self, batch: int, context: int, steps: int) -> Step:
        """A run of decode steps; each sequence has `context` tokens at the end."""
        blocks = -(-context // BLOCK)
        start = context - steps
        spec = SampleSpec(SamplingParams(temperature=0.0))
        sequences = tuple(
            SequenceStep(_ids([row % self.vocab]), start, tuple(range(row * blocks, (row + 1) * blocks)), spec)
            for row in range(batch)
        )
        return self._step(sequences, steps)

    def prompt(self, tokens: int) -> Step:
        """A prompt's chunk; the next token is sampled."""
        ids = [(7 * at + 3) % self.vocab for at in range(tokens)]
        spec = SampleSpec(SamplingParams(temperature=0.0))
        return self._step((SequenceStep(_ids(ids), 0, tuple(range(-(-tokens // BLOCK))), spec),), 1)

    def _step(self, sequences: tuple[SequenceStep, ...], steps: int) -> Step:
        self._next += 1
        return Step(self._next, sequences, steps=steps)


def _ids(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


@contextmanager
def stage(where: Where, served: Served, tokens: int, longest: int, figures: Figures) -> Iterator[Stage]:
    """Load a model with room for `tokens` tokens of KV, in sequences up to `longest`.

    Raises:
        CheckError: a callback of the KV memory failed.
    """
    path = checkpoint(where, served, figures)
    config, dtype = load_config(path), getattr(torch, served.dtype)
    device = open_device(DeviceName.parse(where.device))
    assert device is not None
    model = load_stage(path, config, dtype, 0, config.num_layers, device.torch_device)
    errors: list[BaseException] = []
    layout = kv_layout(config, served.dtype, BLOCK)
    with closing(KVPool.create(layout, tokens // BLOCK, [(0, config.num_layers)])) as pool:
        place = stage_platform(device, pool.parts[0], errors.append)
        with closing(place):
            for layer in place.memory.kv:
                layer.zero_()
            yield Stage(device, model, place, longest, config.vocab_size)
    expect(not errors, f"{served.shape}: {errors}")
