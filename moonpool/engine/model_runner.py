"""Runs steps on one pipeline stage: layers, KV gates, events, and the choice of tokens at the end.

Work is given to the device's compute stream. A plain CPU does it at once, a GPU later. So nothing here reads a tensor
before the stream has computed it.

Packed sequences and rows of the sampler are made once per run and changed in place from step to step: the sequences
of a run do not change, so a decode step has almost nothing to do in Python.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.native.structures import GoOn
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphShape
from moonpool.engine.footprint import LOGIT_ROWS
from moonpool.engine.kv_gate import KVGates, StepState
from moonpool.engine.messages import BlocksFetched, FetchBlocks, StageDone
from moonpool.engine.pipeline import Links
from moonpool.engine.structured_output import MaskBuilder, MaskRequest, PendingMasks
from moonpool.logprobs import Logprobs
from moonpool.models.batch import PackedBatch
from moonpool.models.native_step import NativeRun, Progress, RunResult
from moonpool.models.stage import StageModel, in_inference_mode
from moonpool.platforms.interface import DeviceEvent
from moonpool.platforms.stage_platform import StagePlatform
from moonpool.sampling.logprobs import beam_candidates, compute_logprobs
from moonpool.sampling.native_sampler import NativeRows
from moonpool.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Sampler, SamplerOutput, sampler_output
from moonpool.sampling_params import SampleSpec
from moonpool.scheduling.steps import (
    MAX_RESULTS_TOGETHER,
    REPORT_WITHIN_S,
    LayerDone,
    SampledCandidates,
    ScoredTokens,
    SequenceStep,
    Step,
)

_NO_MASKS: dict[int, memoryview] = {}
"""Always the same: the sampler looks at masks only where they are others than before."""


@dataclass(slots=True)
class StepOutput:
    """As the fields of `StepResult`; and how long grammars of masks were waited for."""

    sampled: list[int | None] = field(default_factory=list)
    several: dict[int, SampledCandidates] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    scores: dict[int, Logprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    awaited_ns: int = 0


class StepSampler:
    """What is wanted of the last hidden states of a step and, where it is a run, of its further steps.

    Args:
        model: the last stage.
        step: the run's first.
        dropped: sequences, by index, that nothing is wanted of any more.

    Attributes:
        logits: of the first part, the largest, once there are some: the others take its memory after it.
    """

    def __init__(self, model: StageModel, step: Step, dropped: Container[int]) -> None:
        self._model, self._count = model, len(step.sequences)
        self.logits: Tensor | None = None
        live = [(index, sequence) for index, sequence in enumerate(step.sequences) if index not in dropped]
        wanted = [(index, sequence.sample) for index, sequence in live if sequence.sample is not None]
        self._parts = [
            _LogitsPart(model, wanted[begin : begin + LOGIT_ROWS], step.steps)
            for begin in range(0, len(wanted), LOGIT_ROWS)
        ]
        self._scored = [
            (index, len(sequence.token_ids) // 4, sequence.scored)
            for index, sequence in live
            if sequence.scored is not None
        ]

    def choose(self, hidden: Tensor, batch: PackedBatch, masks: PendingMasks | None) -> StepOutput:
        """Everything that is wanted of the `hidden` states [T, hidden] after the last layer.

        `masks`: which tokens may follow, where not all may.
        """
        found = StepOutput([None] * self._count)
        for part in self._parts:
            self.logits = part.choose(hidden, batch, masks, found, self.logits)
        for index, tokens, scored in self._scored:
            last = int(batch.last_rows[index])
            found.scores[index] = _score_tokens(self._model, hidden[last + 1 - tokens : last + 1], scored)
        return found

    @property
    def tokens_address(self) -> int | None:
        """Address of the last step's tokens, one int32 per sequence. None if native code cannot sample whole steps.

        With an address, the logits of all sequences are computed together, for `choose_from`.
        """
        whole = len(self._parts) == 1 and not self._scored
        return self._parts[0].tokens_address(self._count) if whole else None

    def choose_from(self, logits: int, masks: PendingMasks | None) -> StepOutput:
        """As `choose`, from all sequences' logits [S, vocab] at an address; they are overwritten."""
        return self._parts[0].draw_all(logits, masks)

    def attach(self, further: GoOn) -> bool:
        """See `NativeRows.attach`. Needs a `tokens_address`, as the next three methods do."""
        return self._parts[0].attach(further)

    def set_masks(self, masks: PendingMasks) -> StepOutput:
        """Set the masks of the next step; return what is known before it: sequences that failed, time waited."""
        return self._parts[0].set_masks(masks)

    def last_output(self, masks: PendingMasks | None) -> StepOutput:
        """Return the output of the last step. `masks`: those of that step."""
        return self._parts[0].last_output(masks)

    def set_previous(self, tokens: Sequence[int]) -> None:
        """Set each sequence's token before the run's first step; nothing to do without a `tokens_address`."""
        if self.tokens_address is not None:
            self._parts[0].set_previous(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go to the run's next step, after sequence i got `tokens[i]`."""
        for part in self._parts:
            part.advance(tokens)


class _LogitsPart:
    """Sequences whose logits are computed together."""

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
        found: StepOutput,
        room: Tensor | None,
    ) -> Tensor:
        """Each row's tokens; for beams the most likely ones, which are not drawn.

        Returns:
            Logits that nobody needs any more: `room`, or where there was none those of this part.
        """
        if len(self._wanted) != batch.num_tokens:
            hidden = hidden[batch.last_rows[[index for index, _ in self._wanted]]]
        logits = self._model.logits(hidden, out=None if room is None else room[: len(self._wanted)])
        room = logits if room is None else room
        if len(self._drawn) != len(self._wanted):
            for row, (index, spec) in enumerate(self._wanted):
                if spec.best:
                    _beam_candidates(logits[row], index, spec, found)
            logits = logits[[row for row, _ in self._drawn]]
        self._note(self._sampler.sample(logits, self._allowed(masks, found)), found)
        return room

    def draw_all(self, logits: int, masks: PendingMasks | None) -> StepOutput:
        """As `Choosing.choose_from`: these are all sequences."""
        found = StepOutput()
        tokens = self._native.sample_at(logits, self._allowed(masks, found))
        if tokens is not None and not found.failed:
            found.sampled = list(tokens)
            return found
        found.sampled = [None] * len(self._wanted)
        self._note(sampler_output(self._native.choices()), found)
        return found

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
        found = StepOutput()
        self._native.set_masks(self._allowed(masks, found))
        return found

    def last_output(self, masks: PendingMasks | None) -> StepOutput:
        """See `StepSampler.last_output`."""
        found = StepOutput([None] * len(self._wanted))
        self._allowed(masks, found)
        self._note(sampler_output(self._native.choices()), found)
        return found

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

    def _allowed(self, masks: PendingMasks | None, found: StepOutput) -> dict[int, memoryview]:
        """Masks by row of those that are drawn, the same objects in all steps; `found` says where there is none."""
        if masks is None:
            return _NO_MASKS
        made = masks.now()
        found.awaited_ns = made.waited_ns
        found.failed.update((index, made.failed[index]) for _, index in self._drawn if index in made.failed)
        if made.masks is not self._seen:
            self._seen = made.masks
            self._masks = {at: made.masks[index] for at, (_, index) in enumerate(self._drawn) if index in made.masks}
        return self._masks

    def _note(self, chosen: SamplerOutput, found: StepOutput) -> None:
        for at, (_, index) in enumerate(self._drawn):
            if at in chosen.failed:
                found.failed.setdefault(index, chosen.failed[at])
            if index in found.failed:
                continue
            tokens = chosen.tokens[at]
            found.sampled[index] = tokens[0]
            if len(tokens) > 1:
                found.several[index] = SampledCandidates(tuple(tokens))
            if at in chosen.logprobs:
                found.logprobs[index] = chosen.logprobs[at]


def _beam_candidates(logits: Tensor, index: int, spec: SampleSpec, found: StepOutput) -> None:
    """A beam's most likely tokens; a beam without any ends its search."""
    tokens, scores = beam_candidates(logits, spec)
    if tokens:
        found.sampled[index], found.several[index] = tokens[0], SampledCandidates(tuple(tokens), tuple(scores))
    else:
        found.failed[index] = NOTHING_LEFT if bool(torch.isfinite(logits).all()) else NOT_FINITE


def _score_tokens(model: StageModel, hidden: Tensor, scored: ScoredTokens) -> Logprobs:
    """Log probabilities of the tokens after the leading rows of `hidden`."""
    tokens, found = torch.frombuffer(bytearray(scored.token_ids), dtype=torch.int32).tolist(), Logprobs()
    for begin in range(0, len(tokens), LOGIT_ROWS):
        part = tokens[begin : begin + LOGIT_ROWS]
        logits = model.logits(hidden[begin : begin + len(part)])
        for its in compute_logprobs(logits, [[token] for token in part], scored.top):
            found.extend(its)
    return found


@dataclass(slots=True)
class StepRun:
    """The tensors belong to the computing lane while a step is under way."""

    step: Step
    """As it was ordered: the run's first."""
    packed: PackedBatch
    """On the host."""
    masks: PendingMasks | None
    """Of the step under way, where some are wanted."""
    tails: list[int] | None
    """Of each sequence, its last rows whose hidden states after the last layer are wanted; None = all rows."""
    layer: int
    """That it has come to."""
    left: int
    """Steps after this one, at most."""
    batch: PackedBatch = field(init=False)
    """`packed` where it is computed; on the host where a graph computes it."""
    shape: GraphShape | None = None
    """Of the graph that all layers of the step are."""
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, hidden]; before the embedding nothing
    choosing: StepSampler | None = None
    """Made with the first choice."""
    native: NativeRun | None = None
    """Its steps from now on, where native calls take them."""
    found: StepOutput = field(default_factory=StepOutput)
    followed: DeviceEvent | None = None
    """Where all is told that follows from its layers, if another thread does that."""
    _untold: list[StageDone] = field(default_factory=list)
    ends: frozenset[int] = field(init=False)
    """Tokens that it may be over with."""

    def __post_init__(self) -> None:
        self.batch = self.packed
        self.ends = frozenset().union(*(sequence.end_token_ids for sequence in self.step.sequences))

    def following(self) -> list[int] | None:
        """What each sequence goes on with; None when the run is over with this step."""
        if not self.left or self.choosing is None:
            return None
        tokens = [token for token in self.found.sampled if token is not None]
        if len(tokens) < len(self.found.sampled):
            return None
        if not self.ends.isdisjoint(tokens):
            pairs = zip(self.step.sequences, tokens, strict=True)
            return None if any(token in sequence.end_token_ids for sequence, token in pairs) else tokens
        return tokens

    def go_on(self, tokens: list[int], layer: int) -> None:
        """Makes it the run's next step, which begins at `layer` and goes on with these tokens; `masks` are set."""
        assert self.choosing is not None
        if self.native is None or not self.native.alone:
            self.choosing.advance(tokens)
        if self.native is None:
            self.packed = self.batch = self.packed.after(tokens)
        self.tails, self.layer, self.left = None, layer, self.left - 1

    def together(self, now_ns: int) -> tuple[int, int]:
        """How many steps may be taken before the next one is told, and when one is told at the latest."""
        first_ns = self._untold[0].end_ns if self._untold else now_ns
        alone = self.step.patient and self.masks is None  # masks are made between two steps
        most = MAX_RESULTS_TOGETHER - len(self._untold) if alone else 1
        return min(most, self.left + 1), first_ns + round(REPORT_WITHIN_S * 1e9)

    def told(self, done: StageDone) -> StageDone | None:
        """What is told when a step is over; None where it waits for further ones of the run."""
        if self.step.patient and not done.over and len(self._untold) + 1 < MAX_RESULTS_TOGETHER:
            first = self._untold[0] if self._untold else done
            if done.end_ns - first.end_ns < REPORT_WITHIN_S * 1e9:
                self._untold.append(done)
                return None
        earlier, self._untold = tuple(self._untold), []
        return replace(done, earlier=earlier) if earlier else done


class _StepTimes(NamedTuple):
    """When a step started, when it began to compute, and its thread's time then."""

    start_ns: int
    began_ns: int
    ran_ns: int


@dataclass(slots=True)
class StageRunner:
    """Runs steps on one stage, one after the other."""

    stage: int
    model: StageModel
    place: StagePlatform
    links: Links
    gates: KVGates
    emit: Callable[[LayerDone | StageDone | BlocksFetched], None]
    """Called by this thread, or another one."""
    gate_timeout_s: float
    masks: MaskBuilder | None = None
    """Of the last stage; None = answers have no format."""
    give_way: Callable[[Callable[[], bool]], None] = lambda urgent: None
    """Called in the beginning of a patient step, with what tells whether it may not wait (any more)."""
    share: Callable[[int], float] = lambda steps: 1.0
    """Which share of the cores that it wanted this process had since it was asked before, so many steps ago
    (`moonpool.engine.cpu_sharing`)."""
    graphs: DecodeGraphs | None = None
    """Of decode steps; None = all run layer by layer."""
    _following: tuple[StepRun, list[int]] | None = None
    """The run that goes on, and its tokens."""

    def close(self) -> None:
        """Waits until everything sent has been received, and ends the stage's threads."""
        self.links.flush()
        self.place.close()
        if self.masks is not None:
            self.masks.close()

    def fetch(self, order: FetchBlocks) -> None:
        """Lets the pool have all that is known of some blocks."""
        self.place.memory.fetch(order.blocks, partial(self.emit, BlocksFetched(order.number, self.stage)))

    @in_inference_mode
    def run(self, step: Step) -> bool:
        """Runs one step to its end, done or aborted; emits its events, `StepDone` last.

        Returns:
            Whether its run goes on: `go_on` runs the next step of it, `run` another one.
        """
        masks = self.masks.begin(MaskRequest.of(step)) if self.masks is not None else None
        clocks = self._begin(step)
        self.place.memory.begin(step)
        if (run := self._begun_natively(step, masks)) is not None:
            assert run.native is not None
            self._make_masks(run)
            return self._natively(run, run.native, clocks)
        parts = [(it.token_ids, it.start, it.block_table) for it in step.sequences]
        full_hits = [index for index, it in enumerate(step.sequences) if it.full_hit]
        packed = PackedBatch.build(parts, self.place.memory.kv.shape[4], full_hits=full_hits)
        run = StepRun(step, packed, masks, self._tails(step), self.model.layer_begin, step.steps - 1)
        self._make_masks(run)
        return self._step(run, clocks)

    def go_on(self) -> bool:
        """As `run`, for the next step of the run."""
        assert self._following is not None
        run, tokens = self._following
        clocks = self._begin(run.step)
        self._make_masks(run)
        if run.native is None:
            run.native = self._native(run, run.left)
        run.go_on(tokens, self.model.layer_begin)
        if run.native is not None:
            return self._natively(run, run.native, clocks)
        self.place.memory.go_on(run.packed.block_ids.tolist(), run.packed.filled())
        return self._step(run, clocks)

    @in_inference_mode
    def _step(self, run: StepRun, clocks: _StepTimes) -> bool:
        done = self._received(run) and (self._layers(run) if run.shape is None else self._graph(run))
        if done and self.model.is_last:
            self.place.lane.run(partial(self._choose, run))
        self.place.lane.mark().wait()
        if not done:
            run.found = StepOutput()
        following = self._begin_following(run, done=done)
        # Sent whatever has happened, so that the next stage knows.
        self.links.send(run.step.step_id, run.hidden if done else None)
        share = self._share(run, clocks)
        if run.followed is not None:
            run.followed.wait()
        return self._over(run, clocks, share, following, done=done)

    def _natively(self, run: StepRun, native: NativeRun, clocks: _StepTimes) -> bool:
        """Steps of a run in one call, on a plain CPU: nothing else that is done for a step is left."""
        assert run.choosing is not None
        if native.alone and run.masks is not None:
            run.found = run.choosing.set_masks(run.masks)
        came, memory = native.go_on(*run.together(clocks.began_ns)), self.place.memory
        if came.filled:
            memory.go_on((), came.filled)
            for layer in range(self.model.layer_begin, self.model.layer_end):
                memory.leave(layer, None)
        run.left -= came.steps + came.stopped - 1
        if not native.alone:
            run.found = StepOutput() if came.stopped else run.choosing.choose_from(native.logits_at, run.masks)
        share = self._share(run, clocks, came.steps + came.stopped)
        if native.alone:
            clocks = self._tell(run, native, came, clocks, share)
        return self._over(run, clocks, share, self._begin_following(run, done=not came.stopped), done=not came.stopped)

    def _tell(self, run: StepRun, native: NativeRun, came: RunResult, clocks: _StepTimes, share: float) -> _StepTimes:
        """Reports all but the last step of a call; `run.found` and the times returned are the last one's."""
        assert run.choosing is not None
        odd, last = bool(run.found.failed or run.found.awaited_ns), came.steps + came.stopped - 1
        for index, (tokens, over_ns) in enumerate(native.tokens(came.steps)):
            run.found = StepOutput(list(tokens))
            if index < last:
                self._report(run, run.found, clocks, share, over_ns, aborted=False, over=False)
                clocks = clocks._replace(start_ns=over_ns, began_ns=over_ns)
        if came.stopped:
            run.found = StepOutput()
        elif native.failed or odd:
            run.found = run.choosing.last_output(run.masks)
        return clocks

    def _make_masks(self, run: StepRun) -> None:
        """On a plain CPU before the layers; on a device the sampler makes them while it computes."""
        if run.masks is not None and self.place.device is None:
            run.masks.early()

    def _begin_following(self, run: StepRun, *, done: bool) -> list[int] | None:
        """The tokens of the run's next step, whose masks are begun; None where it is over."""
        following = run.following() if done and not self.gates.is_cut(run.step.step_id) else None
        if following is not None and self.masks is not None:
            run.masks = self.masks.go_on(following)
        return following

    def _over(self, run: StepRun, clocks: _StepTimes, share: float, following: list[int] | None, *, done: bool) -> bool:
        """Reports the step; whether its run goes on."""
        self._following = None if following is None else (run, following)
        if following is None:
            # Gates are done before the report: its receiver may open gates of the next step at once.
            self.gates.done(run.step.step_id)
        report = partial(self._report, run, run.found, clocks, share, 0, aborted=not done, over=following is None)
        self.place.memory.over(report, aborted=not done)
        return following is not None

    def _received(self, run: StepRun) -> bool:
        """Brings the batch to its place, with the hidden states of the stage before; False when that has aborted."""
        run.shape = self.graphs.shape(run.step, run.packed) if self.graphs is not None else None
        if run.shape is None and self.place.torch_device.type != "cpu":
            run.batch = run.packed.to(self.place.torch_device)
        if self.model.is_first:
            if run.shape is None:
                self.place.lane.run(partial(self._embed, run))
            return True
        hidden = self.links.receive(run.step.step_id, run.packed.num_tokens)
        if hidden is None:
            return False
        run.hidden = hidden
        self.place.lane.run(partial(self._take_over, run))
        return True

    def _layers(self, run: StepRun) -> bool:
        """Gives all layers of this stage to the lane; False when the step was aborted before the last.

        On a plain CPU, where work is done when it is given, they go together as far as gates are open. Where each is
        told, that takes a courier who follows them.
        """
        step, cpu = run.step, self.place.device is None
        progress = self.model.progress() if cpu and step.layer_events else None
        together = cpu and (progress is not None or not step.layer_events)
        watch = self.gates.watch(step.step_id, gated=step.gated) if together else None
        if progress is None:
            return self._given(run, watch, None)
        run.followed = self.place.courier.send(partial(self._follow, step.step_id, progress))
        try:
            return self._given(run, watch, progress)
        finally:
            progress.end()

    def _given(self, run: StepRun, watch: StepState | None, progress: Progress | None) -> bool:
        """As `_layers`: together where there is a watch."""
        step, place, layer, end = run.step, self.place, self.model.layer_begin, self.model.layer_end
        while layer < end:
            if step.gated and not self.gates.wait(step.step_id, layer, self.gate_timeout_s):
                return False
            if self.gates.aborted(step.step_id):
                return False
            start_ns = time.monotonic_ns()
            last = layer + 1 if watch is None else end
            for its in range(layer, last):
                place.memory.need(its)
            place.lane.run(partial(self._run_layers, layer, last, run, watch, progress))
            came = last if watch is None else run.layer
            for its in range(layer, came) if progress is None else ():
                told = partial(self._layer_done, step.step_id, its, start_ns) if step.layer_events else None
                place.memory.leave(its, told)
            layer = came
        return True

    def _begun_natively(self, step: Step, masks: PendingMasks | None) -> StepRun | None:
        """A run whose first step is like the further ones, so that native calls take it, too; None where it is not."""
        if step.steps == 1 or not self.model.native or not all(map(_like_further, step.sequences)):
            return None
        if masks is not None and masks.waits:  # for grammars, which are compiled beside the layers of a first step
            return None
        # As the step before left it: native code begins with each sequence's next token.
        parts = [(it.token_ids, it.start - 1, it.block_table) for it in step.sequences]
        packed = PackedBatch.build(parts, self.place.memory.kv.shape[4])
        run = StepRun(step, packed, masks, None, self.model.layer_begin, step.steps - 1)
        run.choosing = StepSampler(self.model, step, self.gates.dropped(step.step_id))
        run.choosing.set_previous(packed.arrays["token_ids"].tolist())
        run.native = self._native(run, step.steps)
        return None if run.native is None else run

    def _native(self, run: StepRun, steps: int) -> NativeRun | None:
        """What computes so many steps of a run, each in one call; None where they go one operation at a time."""
        step, choosing = run.step, run.choosing
        plain = self.place.device is None and not step.gated and not step.layer_events
        if (
            not plain
            or choosing is None
            or choosing.tokens_address is None
            or len(step.sequences) != run.packed.num_tokens
        ):
            return None
        memory, watch = self.place.memory, self.gates.watch(step.step_id, gated=False)
        native = self.model.going_on(
            run.packed,
            memory.kv,
            steps,
            choosing.tokens_address,
            scales=memory.scales,
            out=choosing.logits,
            watch=watch,
        )
        if native is not None:
            native.choose_by(choosing.attach, run.ends)
        return native

    def _graph(self, run: StepRun) -> bool:
        """Gives all layers of this stage to the lane as one graph; False when the step was aborted before."""
        if self.gates.aborted(run.step.step_id):
            return False
        layers, memory = range(self.model.layer_begin, self.model.layer_end), self.place.memory
        for layer in layers:
            memory.need(layer)
        self.place.lane.run(partial(self._replay, run))
        for layer in layers:
            memory.leave(layer, None)
        return True

    def _tails(self, step: Step) -> list[int] | None:
        """Of each sequence, its last rows whose hidden states after the last layer are wanted; None = all rows."""
        if not self.model.is_last:
            return None
        return [
            len(it.token_ids) // 4 if it.scored is not None else int(it.sample is not None) for it in step.sequences
        ]

    # --- in the lane -----------------------------------------------------------------------------------------------

    def _take_over(self, run: StepRun) -> None:
        run.hidden = run.hidden.to(self.place.torch_device)

    def _embed(self, run: StepRun) -> None:
        run.hidden = self.model.embed(run.batch.token_ids)

    def _run_layers(
        self, first: int, last: int, run: StepRun, watch: StepState | None, progress: Progress | None
    ) -> None:
        tails, memory = run.tails if last == self.model.layer_end else None, self.place.memory
        run.layer, run.hidden = self.model.run(
            run.hidden, run.batch, memory.kv, first, last,
            scales=memory.scales, tails=tails, watch=watch, progress=progress,
        )  # fmt: skip

    def _replay(self, run: StepRun) -> None:
        assert self.graphs is not None
        assert run.shape is not None
        run.hidden = self.graphs.run(run.shape, run.batch, run.hidden)

    def _choose(self, run: StepRun) -> None:
        if run.choosing is None:
            run.choosing = StepSampler(self.model, run.step, self.gates.dropped(run.step.step_id))
        run.found = run.choosing.choose(run.hidden, run.batch, run.masks)

    # --- in the courier --------------------------------------------------------------------------------------------

    def _follow(self, step_id: int, progress: Progress) -> None:
        """Does what follows from each layer, when it is computed; from none that is not."""
        for layer in range(self.model.layer_begin, self.model.layer_end):
            if not progress.wait(layer):
                return
            self.place.memory.leave(layer, partial(self._layer_done, step_id, layer, progress.began_ns(layer)))

    # --- when it is done -------------------------------------------------------------------------------------------

    def _layer_done(self, step_id: int, layer: int, start_ns: int) -> None:
        self.emit(LayerDone(step_id, layer, start_ns, time.monotonic_ns()))

    def _begin(self, step: Step) -> _StepTimes:
        """Gives way first where the step is patient."""
        start_ns = time.monotonic_ns()
        if step.patient:
            self.give_way(partial(self.gates.is_urgent, step.step_id))
        return _StepTimes(start_ns, time.monotonic_ns(), time.thread_time_ns())

    def _share(self, run: StepRun, clocks: _StepTimes, steps: int = 1) -> float:
        """Of the cores that was had since a step began, and in the steps behind it."""
        return self.share(steps) * self._ran(run.step, clocks, run.found.awaited_ns)

    def _ran(self, step: Step, clocks: _StepTimes, awaited_ns: int) -> float:
        """Which share of the time since a step began to compute this thread ran: else something else had its core.

        Time in which it waited for grammars is left out. 1 where it may have waited for something else than cores and
        them: other stages, a device, a gate.
        """
        alone = self.model.is_first and self.model.is_last and self.place.device is None and not step.gated
        took_ns = time.monotonic_ns() - clocks.began_ns - awaited_ns
        return min(1.0, (time.thread_time_ns() - clocks.ran_ns) / took_ns) if alone and took_ns else 1.0

    def _report(
        self,
        run: StepRun,
        found: StepOutput,
        clocks: _StepTimes,
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
            tuple(found.sampled),
            aborted,
            clocks.start_ns,
            end_ns or time.monotonic_ns(),
            several=found.several,
            logprobs=found.logprobs,
            scores=found.scores,
            failed=found.failed,
            over=over,
            share=share,
            waited_ns=clocks.began_ns - clocks.start_ns,
        )
        if (told := run.told(done)) is not None:
            self.emit(told)


def _like_further(sequence: SequenceStep) -> bool:
    """Whether a sequence's share of a run's first step is one token behind others, as in the steps after it."""
    return len(sequence.token_ids) == 4 and sequence.start > 0 and sequence.scored is None and not sequence.full_hit
