"""The mode that replays captured graphs: all layers of a decode step as one, and of other steps layer by layer.

If the rows sample plainly (`moonpool.engine.sampling.captured`), graphs also choose the tokens, and feed them to the
run's next step. Then the device is given that step before the host has read the tokens of the step before. If the run
ends with those tokens, the further step is thrown away: the device knows the end, and the step writes nothing.

A step that may be taken again must not have changed a recurrent state, and graphs keep no states. So with such states
masks are made before the layers, which are launched if a mask is late. So are the layers of gated steps that begin
within a block. Without gates a step that has begun is not given up.
"""

from functools import partial

from moonpool.base.scheduling.steps import Step
from moonpool.engine.cuda_graphs import GraphShape
from moonpool.engine.kv_gate import StepState
from moonpool.engine.layer_run import LayerRun, within_blocks
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.native_step import Progress
from moonpool.engine.prompt_graphs import ChunkShape
from moonpool.engine.run_mode import StageParts
from moonpool.engine.sampling.captured import MAX_ENDS, PlainRows, is_plain
from moonpool.engine.step_run import StepRun, StepStart
from moonpool.engine.step_sampler import StepOutput
from moonpool.engine.steps_ahead import StepsAhead
from moonpool.engine.structured_output import PendingMasks

_ENDS_OFTEN = 1 / 8
"""Runs that end early, a step: from here on no step is given ahead, because too many would be thrown away."""
_OF_LATE = 1 / 16
"""Weight of the last step in that mean."""


class GraphRun(LayerRun):
    """Computes steps for which graphs were captured; the layers of other steps are launched one by one."""

    def __init__(self, stage: StageParts) -> None:
        super().__init__(stage)
        self._early_ends, self._recurrent = 0.0, stage.model.config.decoder.recurrent

    def begin(self, step: Step, masks: PendingMasks | None) -> StepRun:
        run = super().begin(step, masks)
        specs = [sequence.sample for sequence in step.sequences if sequence.scored is None]
        plain = [spec for spec in specs if spec is not None and is_plain(spec)]
        ends = [sequence.end_token_ids for sequence in step.sequences]
        few = max(map(len, ends)) <= MAX_ENDS
        if masks is None and few and len(plain) == len(step.sequences):
            run.plain = PlainRows(plain, ends, self._stage.model.config.vocab_size)
        return run

    @in_inference_mode
    def compute(self, run: StepRun, times: StepStart) -> list[int] | None:
        if run.ahead is None:
            run.ahead = self._steps_ahead(run)
        return super().compute(run, times) if run.ahead is None else self._go_on(run, run.ahead, times)

    def _shape(self, run: StepRun) -> GraphShape | ChunkShape | None:
        if not self._captures(run):
            return None
        shape, graphs = self._decode_shape(run), self._stage.prompt_graphs
        if shape is not None or graphs is None:
            return shape
        may_end = self._recurrent and run.step.gated and within_blocks(run.packed)
        return None if may_end else graphs.shape(run.packed)

    def _decode_shape(self, run: StepRun, later: int = 0) -> GraphShape | None:
        graphs = self._stage.graphs
        return None if graphs is None else graphs.shape(run.step, run.packed, later)

    def _captures(self, run: StepRun) -> bool:
        """Tell whether graphs have what a step computes.

        They have no rows of pictures.
        """
        if self._recurrent and run.pending_masks is not None and not run.pending_masks.in_time():
            return False
        return not run.has_media

    def _steps_ahead(self, run: StepRun) -> StepsAhead | None:
        """Return what gives the run's steps to the device from now on; None: the host chooses the step's tokens."""
        graphs, rows = self._stage.graphs, run.plain
        if graphs is None or not graphs.samples_some:
            return None
        shape = self._decode_shape(run, run.left) if rows is not None and self._captures(run) else None
        if shape is not None and (rows is None or not graphs.samples(run.packed.num_tokens, rows.choice)):
            shape = None
        # Another rank knows neither masks nor what was dropped.
        if not self._decided(shape is not None and not self._stage.kv_gates.dropped(run.step.step_id))[0]:
            return None
        assert shape is not None
        assert rows is not None
        later = run.step.steps - 1 - run.left
        return StepsAhead(graphs, self._stage.platform.stream, shape, run.packed, rows, later)

    def _go_on(self, run: StepRun, ahead: StepsAhead, times: StepStart) -> list[int] | None:
        """Compute the step under way, and give the device the next."""
        gates, memory, step_id = self._stage.kv_gates, self._stage.platform.memory, run.step.step_id
        layers = range(self._stage.model.layer_begin, self._stage.model.layer_end)
        # A step under way has changed recurrent states: it is not given up any more.
        done = ahead.last is not None or not gates.aborted(step_id)
        ends = gates.is_stopped(step_id) or gates.aborted(step_id)
        done, further = self._decided(done, run.left > 0 and not ends and self._early_ends < _ENDS_OFTEN)
        if done and not ahead.last:
            for layer in layers:
                memory.prepare_layer(layer)
            ahead.give()
        if done and further:
            ahead.give()
        run.output, behind = ahead.read() if done else (StepOutput(), None)
        for layer in layers if done else ():
            memory.finish_layer(layer, None, behind)
        following = self._begin_next(run, done=done, under_way=ahead.last is not None) if self._first else None
        early = following is None and run.left > 0 and not gates.is_stopped(step_id)
        self._early_ends += (early - self._early_ends) * _OF_LATE
        if done and self._stage.model.ranks is not None:
            following = self._agree(self._stage.model.ranks, following)
        if not self._first:  # the first rank tells of the tokens
            run.output = StepOutput()
        return self._finish(run, times, 1.0, following, done=done, behind=behind)

    def _compute(self, run: StepRun) -> bool:
        """Give all the stage's layers to the stream as one graph; return False if the step was aborted before."""
        if isinstance(run.shape, ChunkShape):
            self._stage.platform.stream.run(partial(self._begin_layers, run, run.shape))
        if not isinstance(run.shape, GraphShape):
            return super()._compute(run)
        # Once begun, a graph goes through all layers.
        aborted = self._stage.kv_gates.aborted(run.step.step_id) and not self._is_taken_in(run)
        if not self._decided(not aborted)[0]:
            return False
        layers, memory = range(self._stage.model.layer_begin, self._stage.model.layer_end), self._stage.platform.memory
        for layer in layers:
            memory.prepare_layer(layer)
        self._stage.platform.stream.run(partial(self._replay, run, run.shape))
        for layer in layers:
            memory.finish_layer(layer, None)
        return True

    def _may_compute(self, run: StepRun, gate: int) -> bool:
        begun = isinstance(run.shape, ChunkShape) and gate > self._stage.model.layer_begin
        return (begun and self._recurrent and not run.step.gated) or super()._may_compute(run, gate)

    # --- in the stream ---------------------------------------------------------------------------------------------

    def _replay(self, run: StepRun, shape: GraphShape) -> None:
        assert self._stage.graphs is not None
        run.hidden = self._stage.graphs.run(shape, run.batch, run.hidden)

    def _begin_layers(self, run: StepRun, shape: ChunkShape) -> None:
        assert self._stage.prompt_graphs is not None
        self._stage.prompt_graphs.begin(shape, run.batch, run.hidden)

    def _compute_layers(
        self, first: int, last: int, run: StepRun, signals: StepState | None, progress: Progress | None
    ) -> None:
        graphs = self._stage.prompt_graphs
        if graphs is None or not isinstance(run.shape, ChunkShape):
            super()._compute_layers(first, last, run, signals, progress)
            return
        for layer in range(first, last):
            graphs.run(run.shape, layer)
        if last == self._stage.model.layer_end:
            run.hidden = graphs.states(run.packed.num_tokens)
