"""Runs a stage's kernels once before the stage is ready, so that no request waits for a compiler. For devices only.

A few steps take every variant of the kernels (`moonpool.engine.kernels.triton.variants`) and every way to sample; one
has the most tokens. Kernels are compared with plain torch meanwhile (`moonpool.engine.kernels.self_check`). Then the
decode graphs are captured, and the timings at start (`moonpool.engine.calibration`) are replays, as requests see them.
Steps leave garbage in the pool's first blocks, which are unused yet.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import ScoredTokens, SequenceStep, Step
from moonpool.engine.kernels.choice import READS_HOST, REPLACED
from moonpool.engine.kernels.self_check import checking
from moonpool.engine.kernels.triton.variants import BatchShape
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.stage import StageModel
from moonpool.engine.sampling.random_sampler import compare as compare_sampling

log = logging.getLogger(__name__)
_PROMPT = 16
"""Tokens in the prompts whose next token is sampled."""
_EVERY_WAY = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.1, frequency_penalty=0.1,
    repetition_penalty=1.1, logit_bias={1: 1.0}, logprobs=5,
)  # fmt: skip


@in_inference_mode
def warm_up(runner: StageRunner, max_num_batched_tokens: int, longest: int, say: Callable[[str], None]) -> None:
    """Run what the stage's services will run, and capture the graphs.

    Args:
        runner: the stage's, still unused.
        max_num_batched_tokens: tokens in the largest step.
        longest: tokens of the longest sequence; the pool holds them.
        say: told how far this has come.
    """
    quiet = replace(
        runner,
        links=_NoNeighbours(runner.model),
        kv_gates=KVGates(),
        emit=lambda event: None,
        masks=None,
        graphs=None,
        prompt_graphs=None,
    )
    copies = ((0, 1),) if runner.platform.memory.blocks > 1 else ()
    with checking(runner.model.device) as check:
        if runner.model.head is not None:
            runner.platform.stream.run(partial(compare_sampling, check, runner.model.config.vocab_size))
        ranks, settled = runner.model.ranks, False
        while not settled:  # once more with what takes the place of a wrong kernel, of any rank
            known = len(check.found)
            steps = list(_steps(runner, max_num_batched_tokens, longest))
            for number, sequences in enumerate(steps, 1):
                say(f"compiling and checking kernels (step {number} of {len(steps)})")
                check.next_step()
                quiet.run(Step(number, sequences, copies=copies))
            runner.platform.stream.record().wait()
            settled = len(check.found) == known
            settled = settled if ranks is None else ranks.all_say(settled)
    if check.compared and runner.model.device.type == "cuda":
        torch.cuda.empty_cache()  # graphs have memory of their own
    if reading := REPLACED & READS_HOST:
        log.warning("no CUDA graphs: in plain torch these read the host: %s", ", ".join(sorted(reading)))
    if reading if ranks is None else not ranks.all_say(not reading):
        runner.graphs = runner.prompt_graphs = None
    if runner.graphs is not None:
        runner.graphs.capture(runner.platform.stream, say)
    if runner.prompt_graphs is not None:
        runner.prompt_graphs.capture(runner.platform.stream, say)


def _steps(runner: StageRunner, max_num_batched_tokens: int, longest: int) -> Iterator[tuple[SequenceStep, ...]]:
    """Return what is run: every way to sample, every variant of attention, and the most tokens."""
    size = runner.platform.memory.block_size
    prompt = min(_PROMPT, longest)
    every = SampleSpec(_EVERY_WAY, history=bytes(4 * prompt), prompt_tokens=prompt, banned=(2,))
    for spec in (SampleSpec(), SampleSpec(SamplingParams(temperature=0.8)), every):
        yield (replace(_sequence(prompt, prompt, size), sample=spec, scored=ScoredTokens(bytes(4 * prompt), 1)),)
    largest = min(max_num_batched_tokens, longest)
    batches = [*_batches(runner, max_num_batched_tokens, longest), BatchShape(1, largest, largest)]
    if any(layer.attention.index_topk or layer.recurrent for layer in runner.model.config.decoder.layers):
        batches.append(BatchShape(1, 1, longest))  # a row that sees chosen keys, as the largest batch does; a lone one
    for batch in batches:
        yield (_sequence(batch.rows, batch.context, size),) * batch.sequences


def _batches(runner: StageRunner, max_num_batched_tokens: int, longest: int) -> list[BatchShape]:
    """Return the batches that take every variant of Triton's attention; none where other kernels attend."""
    shapes = runner.model.attention_shapes(runner.platform.memory.kv)
    return list(dict.fromkeys(batch for shape in shapes for batch in shape.batches(max_num_batched_tokens, longest)))


def _sequence(rows: int, context: int, block_size: int) -> SequenceStep:
    """A sequence's last `rows` tokens out of `context`, in the pool's first blocks, as the step's other sequences."""
    return SequenceStep(bytes(4 * rows), context - rows, tuple(range(-(-context // block_size))))


class _NoNeighbours:
    """Links of a stage that runs alone: the stage before has sent zeros."""

    def __init__(self, model: StageModel) -> None:
        self._model = model

    def receive(self, step_id: int, rows: int) -> Tensor:
        return torch.zeros(rows, self._model.config.hidden_size, dtype=self._model.dtype)

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """The message is dropped."""

    def flush(self) -> None:
        """No send is pending."""
