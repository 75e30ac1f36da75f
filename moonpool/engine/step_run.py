"""A run: a step and the later steps over the same sequences, and which of the steps' results are reported together.

Packed sequences and sampler rows are made once per run and changed in place from step to step: a run's sequences do not
change, so a decode step has almost nothing to do in Python.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moonpool.base.scheduling.steps import MAX_RESULTS_TOGETHER, REPORT_WITHIN_S, PlacedPicture, Step
from moonpool.engine.cuda_graphs import GraphShape
from moonpool.engine.messages import StageDone
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.native_loop import NativeLoop
from moonpool.engine.platforms.base import DeviceEvent
from moonpool.engine.prompt_graphs import ChunkShape
from moonpool.engine.sampling.captured import PlainRows
from moonpool.engine.step_sampler import StepOutput, StepSampler
from moonpool.engine.steps_ahead import StepsAhead
from moonpool.engine.structured_output import PendingMasks


@dataclass(slots=True)
class StepRun:
    """A run: a step, and the later steps over the same sequences.

    The run's tensors belong to the compute stream while a step is under way.
    """

    step: Step
    """The first step, as ordered."""
    packed: PackedBatch
    """On the host."""
    pending_masks: PendingMasks | None
    """Of the step under way; None: each token may be chosen."""
    last_rows: list[int] | None
    """Number of each sequence's last rows whose hidden states after the last layer are needed; None: all rows."""
    layer: int
    """Layer that the step under way has come to."""
    left: int
    """Steps after this one, at most."""
    batch: PackedBatch = field(init=False)
    """`packed` on the device; on the host if graphs compute the step."""
    shape: GraphShape | ChunkShape | None = None
    """Shape of the step's graph, or of its layers' graphs; None: no graph."""
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, hidden]; empty before the embedding
    sampler: StepSampler | None = None
    """Set from the first sampling on."""
    plain: PlainRows | None = None
    """Set if captured work can choose the tokens of all steps."""
    ahead: StepsAhead | None = None
    """Gives the device the run's steps from now on; None: each step is given when the one before is read."""
    native: NativeLoop | None = None
    """Native loop for the run's steps from now on; None: Python runs them."""
    output: StepOutput = field(default_factory=StepOutput)
    pictures: tuple[PlacedPicture, ...] = ()
    """Of the step under way."""
    reported: DeviceEvent | None = None
    """Event behind the layers' callbacks, if the callback thread makes them."""
    _unreported: list[StageDone] = field(default_factory=list)
    ends: frozenset[int] = field(init=False)
    """The sequences' end tokens."""
    has_media: bool = field(init=False)
    """Whether the first step computes tokens of pictures."""

    def __post_init__(self) -> None:
        self.has_media = any(sequence.media for sequence in self.step.sequences)
        self.batch = self.packed
        self.ends = frozenset().union(*(sequence.end_token_ids for sequence in self.step.sequences))

    def next_tokens(self) -> list[int] | None:
        """Return the token that each sequence continues with; None if the run ends with this step."""
        if not self.left or not self.output.sampled or None in self.output.sampled:
            return None
        tokens = cast("list[int]", self.output.sampled)
        if not self.ends.isdisjoint(tokens):
            pairs = zip(self.step.sequences, tokens, strict=True)
            return None if any(token in sequence.end_token_ids for sequence, token in pairs) else tokens
        return tokens

    def advance(self, layer: int) -> None:
        """Go to the run's next step, which starts at `layer`; `pending_masks` are set already."""
        self.last_rows, self.layer, self.left, self.pictures = None, layer, self.left - 1, ()

    def batch_limits(self, now_ns: int) -> tuple[int, int]:
        """Return how many steps may run before a report, and the latest time of that report, time.monotonic_ns."""
        first_ns = self._unreported[0].end_ns if self._unreported else now_ns
        alone = self.step.patient and self.pending_masks is None  # masks are made between two steps
        most = MAX_RESULTS_TOGETHER - len(self._unreported) if alone else 1
        return min(most, self.left + 1), first_ns + round(REPORT_WITHIN_S * 1e9)

    def to_report(self, done: StageDone) -> StageDone | None:
        """Return the report of a finished step; None if the report waits for later steps in the run."""
        if self.step.patient and not done.over and len(self._unreported) + 1 < MAX_RESULTS_TOGETHER:
            first = self._unreported[0] if self._unreported else done
            if done.end_ns - first.end_ns < REPORT_WITHIN_S * 1e9:
                self._unreported.append(done)
                return None
        earlier, self._unreported = tuple(self._unreported), []
        return replace(done, earlier=earlier) if earlier else done


class StepStart(NamedTuple):
    """A step's start, the computation's start, and the thread's CPU time then, in nanoseconds."""

    start_ns: int
    began_ns: int
    ran_ns: int
