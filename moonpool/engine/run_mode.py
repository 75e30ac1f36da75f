"""How the steps of a run are computed: the contract of the three modes, and what they share.

Work is given to the device's compute stream. A plain CPU computes at once, a GPU later. So modes read no tensor before
the stream has computed the tensor.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.cuda_graphs import DecodeGraphs
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import StageDone, StageEvent, StageTokens
from moonpool.engine.models.batch import BatchLoras, PackedBatch
from moonpool.engine.models.lora import StageLora
from moonpool.engine.models.stage import StageModel
from moonpool.engine.pipeline import Links
from moonpool.engine.platforms.base import DeviceEvent
from moonpool.engine.platforms.stage_platform import StagePlatform
from moonpool.engine.prompt_graphs import PromptGraphs
from moonpool.engine.step_run import StepRun, StepStart
from moonpool.engine.step_sampler import StepOutput
from moonpool.engine.structured_output import MaskBuilder, PendingMasks


@dataclass(slots=True)
class StageParts:
    """What a stage computes with."""

    stage: int
    model: StageModel
    platform: StagePlatform
    links: Links
    kv_gates: KVGates
    emit: Callable[[StageEvent], None]
    """Called by this thread, or another one."""
    gate_timeout_s: float
    masks: MaskBuilder | None = None
    """Of the last stage; None = answers have no format."""
    give_way: Callable[[Callable[[], bool]], None] = lambda urgent: None
    """Called at the start of a patient step; the argument returns whether the step must stop waiting."""
    cpu_share: Callable[[int], float] = lambda steps: 1.0
    """Returns the fraction of the requested CPU time that this process got since the last call, `steps` steps ago
    (`moonpool.engine.cpu_sharing`).
    """
    graphs: DecodeGraphs | None = None
    """Graphs of decode steps; None: no decode step is a graph."""
    prompt_graphs: PromptGraphs | None = None
    """Graphs of the layers of other steps; None: their layers are launched."""
    max_lora_rank: int = 0
    """Largest rank of a LoRA adapter; 0: none is loaded."""
    loras: dict[bytes, StageLora] = field(default_factory=dict)
    """LoRA adapters by id. Other threads add, this thread removes."""

    def begin(self, step: Step) -> StepStart:
        """Return the times of a step's start; a patient step gives way first."""
        start_ns = time.monotonic_ns()
        if step.patient:
            self.give_way(partial(self.kv_gates.is_urgent, step.step_id))
        return StepStart(start_ns, time.monotonic_ns(), time.thread_time_ns())


class RunMode(ABC):
    """One way to compute the steps of runs on a stage.

    `moonpool.engine.layer_run`, `moonpool.engine.graph_run` and `moonpool.engine.native_run` have a mode each.
    """

    def __init__(self, stage: StageParts) -> None:
        self._stage = stage

    @abstractmethod
    def begin(self, step: Step, masks: PendingMasks | None) -> StepRun | None:
        """Return a run that begins with `step`; None: this mode does not compute such a step."""

    @abstractmethod
    def advance(self, run: StepRun, tokens: list[int]) -> None:
        """Go to the run's next step, in which the sequences continue with `tokens`."""

    @abstractmethod
    def compute(self, run: StepRun, times: StepStart) -> list[int] | None:
        """Compute and report the run's step, or further steps; return the tokens of the next, or None: the run ends."""

    def _begin_next(self, run: StepRun, *, done: bool, under_way: bool = False) -> list[int] | None:
        """Return the tokens for the run's next step, and begin the step's masks; None if the run is over.

        `under_way`: the next step has begun, so that a run that is stopped ends with that step.
        """
        goes_on = done and (under_way or not self._stage.kv_gates.is_stopped(run.step.step_id))
        following = run.next_tokens() if goes_on else None
        if following is not None and self._stage.masks is not None:
            run.pending_masks = self._stage.masks.advance(following)
        return following

    def _finish(
        self,
        run: StepRun,
        times: StepStart,
        share: float,
        following: list[int] | None,
        *,
        done: bool,
        behind: DeviceEvent | None = None,
    ) -> list[int] | None:
        """Report the step; return `following`. `behind`: as for `KVMemory.finish_step`."""
        if following is None:
            # Gates are done before the report: the receiver may open the next step's gates at once.
            self._stage.kv_gates.done(run.step.step_id)
        if done and run.step.layer_events and any(token is not None for token in run.output.sampled):
            tokens = self._stage_done(run, run.output, times, share)
            # Encoded pictures are large: the tokens do not wait for their way.
            pictures = tuple(replace(picture, rows=b"") for picture in tokens.pictures)
            self._stage.emit(StageTokens(replace(tokens, pictures=pictures)))
        if run.reported is not None:
            run.reported.wait()  # the report of the step comes after those of all layers
        report = partial(self._report, run, run.output, times, share, 0, aborted=not done, over=following is None)
        self._stage.platform.memory.finish_step(report, aborted=not done, behind=behind)
        return following

    def _add_rope_positions(self, sequences: Sequence[SequenceStep], packed: PackedBatch) -> None:
        """Give the batch the positions by which RoPE turns, where these are not the tokens' places."""
        positions = self._stage.model.picture_positions
        if positions is not None and any(part.rope_shift or part.media for part in sequences):
            positions.set_positions(packed, sequences)

    def _add_loras(self, sequences: Sequence[SequenceStep], packed: PackedBatch) -> None:
        """Give a step's batch the sequences' adapters, if there are any."""
        if any(sequence.lora for sequence in sequences):
            loras = [self._stage.loras[sequence.lora] if sequence.lora else None for sequence in sequences]
            starts, slots = packed.query_start.tolist(), self._stage.model.lora_slots
            if slots is None:
                packed.loras = BatchLoras(loras, starts, "cpu")
            else:
                packed.loras = slots.of_sequences([-1 if lora is None else lora.slot for lora in loras], starts)

    def _cpu_share(self, run: StepRun, times: StepStart, steps: int = 1) -> float:
        """Return the fraction of the requested CPU time since a step began, and in the steps behind."""
        return self._stage.cpu_share(steps) * self._ran(run.step, times, run.output.awaited_ns)

    def _ran(self, step: Step, times: StepStart, awaited_ns: int) -> float:
        """Return the fraction of time since a step began to compute that this thread ran.

        Time spent waiting for masks is left out. 1 if the step may have waited for other stages, a device or a gate.
        """
        alone = (
            self._stage.model.is_first
            and self._stage.model.is_last
            and self._stage.platform.device is None
            and not step.gated
        )
        took_ns = time.monotonic_ns() - times.began_ns - awaited_ns
        return min(1.0, (time.thread_time_ns() - times.ran_ns) / took_ns) if alone and took_ns else 1.0

    def _report(
        self,
        run: StepRun,
        output: StepOutput,
        times: StepStart,
        share: float,
        end_ns: int,
        *,
        aborted: bool,
        over: bool,
    ) -> None:
        """Report a step, alone or with others of the run. `end_ns`: 0 = now."""
        done = self._stage_done(run, output, times, share, end_ns, aborted=aborted, over=over)
        if (report := run.to_report(done)) is not None:
            self._stage.emit(report)

    def _stage_done(
        self,
        run: StepRun,
        output: StepOutput,
        times: StepStart,
        share: float,
        end_ns: int = 0,
        *,
        aborted: bool = False,
        over: bool = True,
    ) -> StageDone:
        """Return what is told of a step; `end_ns`: 0 = now."""
        return StageDone(
            run.step.step_id,
            self._stage.stage,
            tuple(output.sampled),
            aborted,
            times.start_ns,
            end_ns or time.monotonic_ns(),
            several=output.several,
            logprobs=output.logprobs,
            scores=output.scores,
            embeddings=output.embeddings,
            failed=output.failed,
            late=output.late,
            over=over,
            share=share,
            waited_ns=times.began_ns - times.start_ns,
            pictures=run.pictures,
        )
