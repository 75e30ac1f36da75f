"""Runs steps on one pipeline stage: layers, KV gates, events, and the choice of tokens at the end.

Work is given to the device's compute stream. A plain CPU computes at once, a GPU later. So this module reads no tensor
before the stream has computed the tensor.

Packed sequences and sampler rows are made once per run and changed in place from step to step: a run's sequences do not
change, so a decode step has almost nothing to do in Python.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moonpool.base.errors import MoonpoolError
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import (
    MAX_RESULTS_TOGETHER,
    REPORT_WITHIN_S,
    LayerDone,
    SampledCandidates,
    ScoredTokens,
    SequenceStep,
    Step,
)
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphShape
from moonpool.engine.footprint import LOGIT_ROWS
from moonpool.engine.kernels.native.structures import GoOn
from moonpool.engine.kv_gate import KVGates, StepState
from moonpool.engine.messages import (
    BlocksFetched,
    DropLora,
    FetchBlocks,
    KVLoaded,
    LoadKV,
    LoadLora,
    LoraAnswer,
    StageDone,
    StageEvent,
    WorkerFailed,
)
from moonpool.engine.models.batch import BatchLoras, PackedBatch
from moonpool.engine.models.lora import StageLora, load_lora
from moonpool.engine.models.native_step import NativeRun, Progress, RunResult
from moonpool.engine.models.stage import StageModel, in_inference_mode
from moonpool.engine.pipeline import Links
from moonpool.engine.platforms.base import DeviceEvent
from moonpool.engine.platforms.stage_platform import StagePlatform
from moonpool.engine.sampling.logprobs import compute_logprobs, top_candidates
from moonpool.engine.sampling.native_sampler import NativeRows
from moonpool.engine.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Sampler, SamplerOutput, sampler_output
from moonpool.engine.structured_output import MaskBuilder, MaskRequest, PendingMasks

_NO_MASKS: dict[int, memoryview] = {}
"""One object for all steps: the sampler reads masks again only if the object has changed."""


@dataclass(slots=True)
class StepOutput:
    """`StepResult`'s fields with the same names, and the time spent waiting for masks, in nanoseconds."""

    sampled: list[int | None] = field(default_factory=list)
    several: dict[int, SampledCandidates] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    scores: dict[int, Logprobs] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    awaited_ns: int = 0


class StepSampler:
    """Samples a step's tokens, and the tokens for the run's later steps.

    Args:
        model: the last stage.
        step: the run's first.
        dropped: indices of sequences that were dropped from the step.

    Attributes:
        logits: the first, largest group's logits, once computed; the other groups reuse their memory.
    """

    def __init__(self, model: StageModel, step: Step, dropped: Container[int]) -> None:
        self._model, self._count = model, len(step.sequences)
        self.logits: Tensor | None = None
        live = [(index, sequence) for index, sequence in enumerate(step.sequences) if index not in dropped]
        wanted = [(index, sequence.sample) for index, sequence in live if sequence.sample is not None]
        self._groups = [
            _RowGroup(model, wanted[begin : begin + LOGIT_ROWS], step.steps)
            for begin in range(0, len(wanted), LOGIT_ROWS)
        ]
        self._scored = [
            (index, len(sequence.token_ids) // 4, sequence.scored)
            for index, sequence in live
            if sequence.scored is not None
        ]
        self._embedded = [index for index, spec in wanted if spec.params.embedding and not spec.position]

    def choose(self, hidden: Tensor, batch: PackedBatch, masks: PendingMasks | None) -> StepOutput:
        """Return all that the step asks for from `hidden` [T, hidden], the states after the last layer.

        `masks`: tokens that may follow; None: all.
        """
        output = StepOutput([None] * self._count)
        for group in self._groups:
            self.logits = group.choose(hidden, batch, masks, output, self.logits)
        for index, tokens, scored in self._scored:
            last = int(batch.last_rows[index])
            output.scores[index] = _score_tokens(self._model, hidden[last + 1 - tokens : last + 1], scored)
        if self._embedded:
            normed = self._model.normed(hidden[batch.last_rows[self._embedded]]).float()
            unit = torch.nn.functional.normalize(normed, dim=-1).cpu()
            output.embeddings = {
                index: row.numpy().astype("<f4").tobytes() for index, row in zip(self._embedded, unit, strict=True)
            }
        return output

    @property
    def tokens_address(self) -> int | None:
        """The address of the last step's tokens, one int32 per sequence. None if native code cannot sample whole steps.

        With an address, the logits of all sequences are computed together, for `sample_from`.
        """
        whole = len(self._groups) == 1 and not self._scored and not self._embedded
        return self._groups[0].tokens_address(self._count) if whole else None

    def sample_from(self, logits: int, masks: PendingMasks | None) -> StepOutput:
        """As `choose`, from all sequences' logits [S, vocab] at an address; they are overwritten."""
        return self._groups[0].sample_all(logits, masks)

    def attach(self, further: GoOn) -> bool:
        """See `NativeRows.attach`. Needs a `tokens_address`, as the next three methods do."""
        return self._groups[0].attach(further)

    def set_masks(self, masks: PendingMasks) -> StepOutput:
        """Set the masks of the next step; return what is known before the step: failed sequences, time waited."""
        return self._groups[0].set_masks(masks)

    def last_output(self, masks: PendingMasks | None) -> StepOutput:
        """Return the output of the last step. `masks`: those of that step."""
        return self._groups[0].last_output(masks)

    def set_previous(self, tokens: Sequence[int]) -> None:
        """Set each sequence's token before the run's first step; does nothing without a `tokens_address`."""
        if self.tokens_address is not None:
            self._groups[0].set_previous(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go to the run's next step, after sequence i got `tokens[i]`."""
        for group in self._groups:
            group.advance(tokens)


class _RowGroup:
    """Sequences whose logits are computed together: `LOGIT_ROWS` at most."""

    def __init__(self, model: StageModel, wanted: Sequence[tuple[int, SampleSpec]], steps: int) -> None:
        self._model, self._wanted = model, wanted
        self._drawn = [(row, index) for row, (index, spec) in enumerate(wanted) if not spec.best]
        specs = [spec for _, spec in wanted if not spec.best]
        self._sampler = Sampler(specs, model.config.vocab_size, model.device, steps)
        self._seen: dict[int, memoryview] = {}
        self._masks = _NO_MASKS

    def choose(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        masks: PendingMasks | None,
        output: StepOutput,
        room: Tensor | None,
    ) -> Tensor:
        """Write each row's tokens to the output; a row that wants candidates gets the most likely tokens.

        Returns:
            Logits with reusable memory: `room`, or this group's logits without `room`.
        """
        if len(self._wanted) != batch.num_tokens:
            hidden = hidden[batch.last_rows[[index for index, _ in self._wanted]]]
        logits = self._model.logits(hidden, out=None if room is None else room[: len(self._wanted)])
        room = logits if room is None else room
        if len(self._drawn) != len(self._wanted):
            for row, (index, spec) in enumerate(self._wanted):
                if spec.best:
                    _top_candidates(logits[row], index, spec, output)
            logits = logits[[row for row, _ in self._drawn]]
        self._record(self._sampler.sample(logits, self._row_masks(masks, output)), output)
        return room

    def sample_all(self, logits: int, masks: PendingMasks | None) -> StepOutput:
        """As `StepSampler.sample_from`: these are all sequences."""
        output = StepOutput()
        tokens = self._native.sample_at(logits, self._row_masks(masks, output))
        if tokens is not None and not output.failed and not output.late:
            output.sampled = list(tokens)
            return output
        output.sampled = [None] * len(self._wanted)
        self._record(sampler_output(self._native.choices()), output)
        return output

    @property
    def _native(self) -> NativeRows:
        native = self._sampler.native
        assert native is not None
        return native

    def attach(self, further: GoOn) -> bool:
        """See `StepSampler.attach`."""
        return self._native.attach(further)

    def set_masks(self, masks: PendingMasks) -> StepOutput:
        """See `StepSampler.set_masks`."""
        output = StepOutput()
        self._native.set_masks(self._row_masks(masks, output))
        return output

    def last_output(self, masks: PendingMasks | None) -> StepOutput:
        """See `StepSampler.last_output`."""
        output = StepOutput([None] * len(self._wanted))
        self._row_masks(masks, output)
        self._record(sampler_output(self._native.choices()), output)
        return output

    def tokens_address(self, sequences: int) -> int | None:
        """See `StepSampler.tokens_address`, for a step of so many sequences."""
        native = self._sampler.native
        return native.tokens_address if native is not None and len(self._drawn) == sequences else None

    def set_previous(self, tokens: Sequence[int]) -> None:
        """See `StepSampler.set_previous`."""
        self._native.set_previous(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """See `StepSampler.advance`."""
        self._sampler.advance(
            tokens if len(self._drawn) == len(tokens) else [tokens[index] for _, index in self._drawn]
        )

    def _row_masks(self, masks: PendingMasks | None, output: StepOutput) -> dict[int, memoryview]:
        """Return masks by row, the same object if unchanged; add to the output the sequences without a mask."""
        if masks is None:
            return _NO_MASKS
        made = masks.now()
        output.awaited_ns = made.waited_ns
        output.failed.update((index, made.failed[index]) for _, index in self._drawn if index in made.failed)
        output.late |= made.late.intersection(index for _, index in self._drawn)
        if made.masks is not self._seen:
            self._seen = made.masks
            self._masks = {at: made.masks[index] for at, (_, index) in enumerate(self._drawn) if index in made.masks}
        return self._masks

    def _record(self, chosen: SamplerOutput, output: StepOutput) -> None:
        for at, (_, index) in enumerate(self._drawn):
            if index in output.late:
                continue
            if at in chosen.failed:
                output.failed.setdefault(index, chosen.failed[at])
            if index in output.failed:
                continue
            tokens = chosen.tokens[at]
            output.sampled[index] = tokens[0]
            if len(tokens) > 1:
                output.several[index] = SampledCandidates(tuple(tokens))
            if at in chosen.logprobs:
                output.logprobs[index] = chosen.logprobs[at]


def _top_candidates(logits: Tensor, index: int, spec: SampleSpec, output: StepOutput) -> None:
    """Write a row's most likely tokens to the output; a row without any fails."""
    tokens, scores = top_candidates(logits, spec)
    if tokens:
        output.sampled[index], output.several[index] = tokens[0], SampledCandidates(tuple(tokens), tuple(scores))
    else:
        output.failed[index] = NOTHING_LEFT if bool(torch.isfinite(logits).all()) else NOT_FINITE


def _score_tokens(model: StageModel, hidden: Tensor, scored: ScoredTokens) -> Logprobs:
    """Return log probabilities for the tokens after the leading rows in `hidden`."""
    tokens, found = torch.frombuffer(bytearray(scored.token_ids), dtype=torch.int32).tolist(), Logprobs()
    for begin in range(0, len(tokens), LOGIT_ROWS):
        part = tokens[begin : begin + LOGIT_ROWS]
        logits = model.logits(hidden[begin : begin + len(part)])
        for its in compute_logprobs(logits, [[token] for token in part], scored.top):
            found.extend(its)
    return found


class StepMode(Enum):
    """How a step is computed."""

    LAYERS = "layers"
    """Layers given to the stream, one by one or together; then the tokens are sampled."""
    GRAPH = "graph"
    """All layers as one captured graph; then the tokens are sampled."""
    NATIVE = "native"
    """One native call from the last step's tokens to the next, or further."""


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
    """`packed` on the device; on the host if a graph computes the step."""
    shape: GraphShape | None = None
    """Shape of the step's graph; None: no graph."""
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, hidden]; empty before the embedding
    sampler: StepSampler | None = None
    """Set from the first sampling on."""
    native: NativeRun | None = None
    """Native loop for the run's steps from now on; None: Python runs them."""
    output: StepOutput = field(default_factory=StepOutput)
    reported: DeviceEvent | None = None
    """Event behind the layers' callbacks, if the callback thread makes them."""
    _unreported: list[StageDone] = field(default_factory=list)
    ends: frozenset[int] = field(init=False)
    """The sequences' end tokens."""

    def __post_init__(self) -> None:
        self.batch = self.packed
        self.ends = frozenset().union(*(sequence.end_token_ids for sequence in self.step.sequences))

    @property
    def mode(self) -> StepMode:
        """How the current step is computed."""
        if self.native is not None:
            return StepMode.NATIVE
        return StepMode.LAYERS if self.shape is None else StepMode.GRAPH

    def next_tokens(self) -> list[int] | None:
        """Return the token that each sequence continues with; None if the run ends with this step."""
        if not self.left or self.sampler is None:
            return None
        tokens = [token for token in self.output.sampled if token is not None]
        if len(tokens) < len(self.output.sampled):
            return None
        if not self.ends.isdisjoint(tokens):
            pairs = zip(self.step.sequences, tokens, strict=True)
            return None if any(token in sequence.end_token_ids for sequence, token in pairs) else tokens
        return tokens

    def advance(self, tokens: list[int], layer: int) -> None:
        """Go to the run's next step, which starts at `layer` with these tokens; `pending_masks` are set already."""
        assert self.sampler is not None
        if self.native is None or not self.native.samples:
            self.sampler.advance(tokens)
        if self.native is None:
            self.packed = self.batch = self.packed.after(tokens)
        self.last_rows, self.layer, self.left = None, layer, self.left - 1

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


class _StepTimes(NamedTuple):
    """A step's start, the computation's start, and the thread's CPU time then, in nanoseconds."""

    start_ns: int
    began_ns: int
    ran_ns: int


@dataclass(slots=True)
class StageRunner:
    """Runs steps on one stage, one after the other."""

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
    """Graphs of decode steps; None: no step is a graph."""
    max_lora_rank: int = 0
    """Largest rank of a LoRA adapter; 0: none is loaded."""
    loras: dict[bytes, StageLora] = field(default_factory=dict)
    """LoRA adapters by id. Other threads add, this thread removes."""
    _next: tuple[StepRun, list[int]] | None = None
    """The continuing run, with the next tokens."""

    def close(self) -> None:
        """Wait until everything sent has been received, and end the stage's threads."""
        self.links.flush()
        self.platform.close()
        if self.masks is not None:
            self.masks.close()

    def fetch(self, order: FetchBlocks) -> None:
        """Store all KV of some blocks in the host's pool."""
        self.platform.memory.fetch(order.blocks, partial(self.emit, BlocksFetched(order.number, self.stage)))

    def load(self, order: LoadKV) -> None:
        """Bring KV that landed in the host's pool to the device. Any thread may call this method, while steps run."""
        answer = partial(self.emit, KVLoaded(order.number, self.stage)) if order.number else None
        self.platform.memory.load(answer)

    def load_lora(self, order: LoadLora) -> None:
        """Load an adapter, and answer. Any thread may call this method, while steps run."""
        if self.platform.device is not None:
            self.platform.device.enter_thread()
        try:
            lora = load_lora(
                Path(order.folder), order.lora, self.model.config, self.model.layers, self.model.layer_begin,
                max_rank=self.max_lora_rank,
            )  # fmt: skip
        except MoonpoolError as error:
            failure = WorkerFailed(error.message, type(error).__name__, getattr(error, "field", ""))
            self.emit(LoraAnswer(order.number, self.stage, failure=failure))
        except Exception as error:  # a defect costs this adapter, not the stage
            failure = WorkerFailed(f"LoRA adapter in {order.folder}: {type(error).__name__}: {error}")
            self.emit(LoraAnswer(order.number, self.stage, failure=failure))
        else:
            self.loras[lora.id] = lora
            self.emit(LoraAnswer(order.number, self.stage, lora.nbytes))

    def drop_lora(self, order: DropLora) -> None:
        """Forget an adapter, and answer."""
        self.loras.pop(order.lora, None)
        self.emit(LoraAnswer(order.number, self.stage))

    @in_inference_mode
    def run(self, step: Step) -> bool:
        """Run one step to the end, done or aborted; emit the step's events, `StageDone` last.

        Returns:
            Whether the step's run continues. Then `go_on` runs the run's next step.
        """
        masks = self._begin_masks(step)
        times = self._begin(step)
        self.platform.memory.begin(step)
        run = self._begin_native(step, masks) or self._begin_layers(step, masks)
        self._make_masks(run)
        return self._step(run, times)

    def go_on(self) -> bool:
        """Run the next step of the run; see `run`."""
        assert self._next is not None
        run, tokens = self._next
        times = self._begin(run.step)
        self._make_masks(run)
        if run.native is None:
            run.native = self._native_steps(run, run.left)
        run.advance(tokens, self.model.layer_begin)
        if run.mode is not StepMode.NATIVE:
            self.platform.memory.advance(run.packed.block_ids.tolist(), run.packed.filled())
        return self._step(run, times)

    def _step(self, run: StepRun, times: _StepTimes) -> bool:
        """Run one step in the run's mode; return whether the run goes on."""
        # Native calls need no inference mode, and entering inference mode takes time.
        return self._run_native(run, times) if run.mode is StepMode.NATIVE else self._run_on_stream(run, times)

    @in_inference_mode
    def _run_on_stream(self, run: StepRun, times: _StepTimes) -> bool:
        """Run one step on the compute stream, as layers or as a graph; return whether the run goes on."""
        done = self._receive(run) and (self._replay_graph(run) if run.mode is StepMode.GRAPH else self._run_layers(run))
        if done and self.model.is_last:
            self.platform.stream.run(partial(self._choose, run))
        self.platform.stream.record().wait()
        if not done or run.output.late:  # their tokens are computed again
            self.platform.stream.run(partial(self.model.undo.restore, run.output.late if done else None))
        if not done:
            run.output = StepOutput()
        following = self._begin_next(run, done=done)
        # Sent whatever has happened, so that the next stage knows.
        self.links.send(run.step.step_id, run.hidden if done else None)
        share = self._cpu_share(run, times)
        if run.reported is not None:
            run.reported.wait()
        return self._finish(run, times, share, following, done=done)

    def _run_native(self, run: StepRun, times: _StepTimes) -> bool:
        """Run steps in one native call, on a plain CPU; return whether the run goes on."""
        native = run.native
        assert native is not None
        assert run.sampler is not None
        if native.samples and run.pending_masks is not None:
            run.output = run.sampler.set_masks(run.pending_masks)
        came, memory = native.go_on(*run.batch_limits(times.began_ns)), self.platform.memory
        if came.filled:
            memory.advance((), came.filled)
            for layer in range(self.model.layer_begin, self.model.layer_end):
                memory.finish_layer(layer, None)
        run.left -= came.steps + came.stopped - 1
        if not native.samples:
            run.output = StepOutput() if came.stopped else run.sampler.sample_from(native.logits_at, run.pending_masks)
        share = self._cpu_share(run, times, came.steps + came.stopped)
        if native.samples:
            times = self._report_steps(run, native, came, times, share)
        return self._finish(run, times, share, self._begin_next(run, done=not came.stopped), done=not came.stopped)

    def _report_steps(
        self, run: StepRun, native: NativeRun, came: RunResult, times: _StepTimes, share: float
    ) -> _StepTimes:
        """Report all but the last step of a call; `run.output` and the returned times are those of the last."""
        assert run.sampler is not None
        masked = run.output
        odd, last = bool(masked.failed or masked.late), came.steps + came.stopped - 1
        for index, (tokens, over_ns) in enumerate(native.tokens(came.steps)):
            run.output = StepOutput(list(tokens))
            if index < last:
                self._report(run, run.output, times, share, over_ns, aborted=False, over=False)
                times = times._replace(start_ns=over_ns, began_ns=over_ns)
        if came.stopped:
            run.output = StepOutput()
        elif native.failed or odd:
            run.output = run.sampler.last_output(run.pending_masks)
        return times

    def _begin_masks(self, step: Step) -> PendingMasks | None:
        if self.masks is None:
            return None
        wanted = MaskRequest.of(step)
        return self.masks.begin(wanted, alone=sum(it.may_skip for it in wanted) == len(step.sequences))

    def _make_masks(self, run: StepRun) -> None:
        """Make masks before the layers on a plain CPU; on a device the sampler makes them while the device computes."""
        if run.pending_masks is not None and self.platform.device is None:
            run.pending_masks.early()

    def _begin_next(self, run: StepRun, *, done: bool) -> list[int] | None:
        """Return the tokens for the run's next step, and begin the step's masks; None if the run is over."""
        following = run.next_tokens() if done and not self.kv_gates.is_stopped(run.step.step_id) else None
        if following is not None and self.masks is not None:
            run.pending_masks = self.masks.advance(following)
        return following

    def _finish(
        self, run: StepRun, times: _StepTimes, share: float, following: list[int] | None, *, done: bool
    ) -> bool:
        """Report the step; return whether the step's run continues."""
        self._next = None if following is None else (run, following)
        if following is None:
            # Gates are done before the report: the receiver may open the next step's gates at once.
            self.kv_gates.done(run.step.step_id)
        report = partial(self._report, run, run.output, times, share, 0, aborted=not done, over=following is None)
        self.platform.memory.finish_step(report, aborted=not done)
        return following is not None

    def _receive(self, run: StepRun) -> bool:
        """Bring batch and hidden states to the device; return False if the stage before aborted the step."""
        graphs = self.graphs if run.packed.loras is None else None
        run.shape = graphs.shape(run.step, run.packed) if graphs is not None else None
        if run.shape is None and self.platform.torch_device.type != "cpu":
            run.batch = run.packed.to(self.platform.torch_device)
        if self.model.is_first:
            if run.shape is None:
                self.platform.stream.run(partial(self._embed, run))
            return True
        hidden = self.links.receive(run.step.step_id, run.packed.num_tokens)
        if hidden is None:
            return False
        run.hidden = hidden
        self.platform.stream.run(partial(self._move_hidden, run))
        return True

    def _run_layers(self, run: StepRun) -> bool:
        """Give all layers of this stage to the stream; return False if the step was aborted before the last.

        On a plain CPU, which computes at once, layers go together as far as gates are open. If each is reported, the
        callback thread follows them.
        """
        step, cpu = run.step, self.platform.device is None
        progress = self.model.progress(run.batch.loras) if cpu and step.layer_events else None
        together = cpu and self.model.by_layers and (progress is not None or not step.layer_events)
        signals = self.kv_gates.signals(step.step_id, gated=step.gated) if together else None
        if progress is None:
            return self._give_layers(run, signals, None)
        run.reported = self.platform.callbacks.send(partial(self._follow, step.step_id, progress))
        try:
            return self._give_layers(run, signals, progress)
        finally:
            progress.end()

    def _give_layers(self, run: StepRun, signals: StepState | None, progress: Progress | None) -> bool:
        """As `_run_layers`; together if there are signals, or the model has no layers apart."""
        step, platform, layer, end = run.step, self.platform, self.model.layer_begin, self.model.layer_end
        while layer < end:
            gate = layer if self.model.by_layers else end - 1
            if step.gated and not self.kv_gates.wait(step.step_id, gate, self.gate_timeout_s):
                return False
            if self.kv_gates.aborted(step.step_id):
                return False
            start_ns = time.monotonic_ns()
            last = layer + 1 if signals is None and self.model.by_layers else end
            for its in range(layer, last):
                platform.memory.prepare_layer(its)
            platform.stream.run(partial(self._compute_layers, layer, last, run, signals, progress))
            came = last if signals is None else run.layer
            for its in range(layer, came) if progress is None else ():
                report = partial(self._layer_done, step.step_id, its, start_ns) if step.layer_events else None
                platform.memory.finish_layer(its, report)
            layer = came
        return True

    def _begin_layers(self, step: Step, masks: PendingMasks | None) -> StepRun:
        """Return a run with a first step that goes layer by layer, or as a graph."""
        parts = [(it.token_ids, it.start, it.block_table) for it in step.sequences]
        full_hits = [index for index, it in enumerate(step.sequences) if it.full_hit]
        memory = self.platform.memory
        packed = PackedBatch.build(parts, memory.block_size, full_hits=full_hits, slot_of=memory.slot_of)
        self._add_loras(step, packed)
        return StepRun(step, packed, masks, self._last_rows(step), self.model.layer_begin, step.steps - 1)

    def _add_loras(self, step: Step, packed: PackedBatch) -> None:
        """Give a step's batch the sequences' adapters, if there are any."""
        if any(it.lora for it in step.sequences):
            loras = [self.loras[it.lora] if it.lora else None for it in step.sequences]
            packed.loras = BatchLoras(loras, packed.query_start.tolist(), "cpu")

    def _begin_native(self, step: Step, masks: PendingMasks | None) -> StepRun | None:
        """Return a run whose first step is like the later steps, so that native calls take the step; else None."""
        if step.steps == 1 or not self.model.native or not all(map(_like_further, step.sequences)):
            return None
        if masks is not None and masks.waits:  # for grammars, which are compiled beside the layers of a first step
            return None
        # As left by the step before: native code begins with each sequence's next token.
        parts = [(it.token_ids, it.start - 1, it.block_table) for it in step.sequences]
        packed = PackedBatch.build(parts, self.platform.memory.block_size)
        self._add_loras(step, packed)
        run = StepRun(step, packed, masks, None, self.model.layer_begin, step.steps - 1)
        run.sampler = StepSampler(self.model, step, self.kv_gates.dropped(step.step_id))
        run.sampler.set_previous(packed.arrays["token_ids"].tolist())
        run.native = self._native_steps(run, step.steps)
        return None if run.native is None else run

    def _native_steps(self, run: StepRun, steps: int) -> NativeRun | None:
        """Return the native loop for `steps` steps of a run; None if Python runs them."""
        step, sampler = run.step, run.sampler
        plain = self.platform.device is None and not step.gated and not step.layer_events
        if (
            not plain
            or sampler is None
            or sampler.tokens_address is None
            or len(step.sequences) != run.packed.num_tokens
        ):
            return None
        memory, signals = self.platform.memory, self.kv_gates.signals(step.step_id, gated=False)
        native = self.model.native_run(
            run.packed,
            memory.kv,
            steps,
            sampler.tokens_address,
            scales=memory.scales,
            out=sampler.logits,
            signals=signals,
        )
        if native is not None:
            native.sample_by(sampler.attach, run.ends)
        return native

    def _replay_graph(self, run: StepRun) -> bool:
        """Give all the stage's layers to the stream as one graph; return False if the step was aborted before."""
        if self.kv_gates.aborted(run.step.step_id):
            return False
        layers, memory = range(self.model.layer_begin, self.model.layer_end), self.platform.memory
        for layer in layers:
            memory.prepare_layer(layer)
        self.platform.stream.run(partial(self._replay, run))
        for layer in layers:
            memory.finish_layer(layer, None)
        return True

    def _last_rows(self, step: Step) -> list[int] | None:
        """Return each sequence's number of last rows that are needed after the last layer; None: all rows."""
        if not self.model.is_last:
            return None
        return [
            len(it.token_ids) // 4 if it.scored is not None else int(it.sample is not None) for it in step.sequences
        ]

    # --- in the stream ---------------------------------------------------------------------------------------------

    def _move_hidden(self, run: StepRun) -> None:
        run.hidden = run.hidden.to(self.platform.torch_device)

    def _embed(self, run: StepRun) -> None:
        run.hidden = self.model.embed(run.batch.token_ids, run.batch.positions)

    def _compute_layers(
        self, first: int, last: int, run: StepRun, signals: StepState | None, progress: Progress | None
    ) -> None:
        last_rows, memory = run.last_rows if last == self.model.layer_end else None, self.platform.memory
        run.layer, run.hidden = self.model.run(
            run.hidden, run.batch, memory.kv, first, last,
            scales=memory.scales, last_rows=last_rows, signals=signals, progress=progress,
        )  # fmt: skip

    def _replay(self, run: StepRun) -> None:
        assert self.graphs is not None
        assert run.shape is not None
        run.hidden = self.graphs.run(run.shape, run.batch, run.hidden)

    def _choose(self, run: StepRun) -> None:
        if run.sampler is None:
            run.sampler = StepSampler(self.model, run.step, self.kv_gates.dropped(run.step.step_id))
        run.output = run.sampler.choose(run.hidden, run.batch, run.pending_masks)

    # --- in the callback thread ------------------------------------------------------------------------------------

    def _follow(self, step_id: int, progress: Progress) -> None:
        """Finish each layer once computed; end with the first that is not."""
        for layer in range(self.model.layer_begin, self.model.layer_end):
            if not progress.wait(layer):
                return
            self.platform.memory.finish_layer(
                layer, partial(self._layer_done, step_id, layer, progress.began_ns(layer))
            )

    # --- when it is done -------------------------------------------------------------------------------------------

    def _layer_done(self, step_id: int, layer: int, start_ns: int) -> None:
        self.emit(LayerDone(step_id, layer, start_ns, time.monotonic_ns()))

    def _begin(self, step: Step) -> _StepTimes:
        """Return the times of a step's start; a patient step gives way first."""
        start_ns = time.monotonic_ns()
        if step.patient:
            self.give_way(partial(self.kv_gates.is_urgent, step.step_id))
        return _StepTimes(start_ns, time.monotonic_ns(), time.thread_time_ns())

    def _cpu_share(self, run: StepRun, times: _StepTimes, steps: int = 1) -> float:
        """Return the fraction of the requested CPU time since a step began, and in the steps behind."""
        return self.cpu_share(steps) * self._ran(run.step, times, run.output.awaited_ns)

    def _ran(self, step: Step, times: _StepTimes, awaited_ns: int) -> float:
        """Return the fraction of time since a step began to compute that this thread ran.

        Time spent waiting for masks is left out. 1 if the step may have waited for other stages, a device or a gate.
        """
        alone = self.model.is_first and self.model.is_last and self.platform.device is None and not step.gated
        took_ns = time.monotonic_ns() - times.began_ns - awaited_ns
        return min(1.0, (time.thread_time_ns() - times.ran_ns) / took_ns) if alone and took_ns else 1.0

    def _report(
        self,
        run: StepRun,
        output: StepOutput,
        times: _StepTimes,
        share: float,
        end_ns: int,
        *,
        aborted: bool,
        over: bool,
    ) -> None:
        """`end_ns`: 0 = now."""
        done = StageDone(
            run.step.step_id,
            self.stage,
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
        )
        if (report := run.to_report(done)) is not None:
            self.emit(report)


def _like_further(sequence: SequenceStep) -> bool:
    """Whether a sequence's part of a run's first step is one token after others, as in later steps."""
    return len(sequence.token_ids) == 4 and sequence.start > 0 and sequence.scored is None and not sequence.full_hit
