"""One stage's share of one step: layer by layer, behind gates, with events, and at the end what its tokens are.

Work is given to the device's computing lane, which does it at once on a plain CPU and later elsewhere. So nothing here
looks at a tensor before the lane has come to it, and what follows from a layer is told by the stage's KV memory. Where
all layers are one native call, a courier follows them meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from moonpool.engine.choosing import Choosing, Found
from moonpool.engine.devices.opening import Place
from moonpool.engine.gates import Gates, Watch
from moonpool.engine.graphs import DecodeGraphs
from moonpool.engine.masks import Making, Masks, Wanted
from moonpool.engine.messages import Fetch, Fetched, StepDone
from moonpool.engine.pipeline import Links
from moonpool.engine.runs import Run
from moonpool.model.batch import PackedBatch
from moonpool.model.inference import inference
from moonpool.model.native import Progress
from moonpool.model.native_run import Done, NativeRun
from moonpool.model.stage import StageModel
from moonpool.sched.steps import LayerDone, SequenceStep, Step


class _Clocks(NamedTuple):
    """When a step started, when it began to compute, and its thread's time then."""

    start_ns: int
    began_ns: int
    ran_ns: int


@dataclass(slots=True)
class StageRunner:
    """Runs steps on one stage, one after the other."""

    stage: int
    model: StageModel
    place: Place
    links: Links
    gates: Gates
    emit: Callable[[LayerDone | StepDone | Fetched], None]
    """Called by this thread, or another one."""
    gate_timeout_s: float
    masks: Masks | None = None
    """Of the last stage; None = answers have no format."""
    give_way: Callable[[Callable[[], bool]], None] = lambda urgent: None
    """Called in the beginning of a patient step, with what tells whether it may not wait (any more)."""
    share: Callable[[int], float] = lambda steps: 1.0
    """Which share of the cores that it wanted this process had since it was asked before, so many steps ago
    (`moonpool.engine.cores`)."""
    graphs: DecodeGraphs | None = None
    """Of decode steps; None = all run layer by layer."""
    _following: tuple[Run, list[int]] | None = None
    """The run that goes on, and its tokens."""

    def close(self) -> None:
        """Waits until everything sent has been received, and ends the stage's threads."""
        self.links.flush()
        self.place.close()
        if self.masks is not None:
            self.masks.close()

    def fetch(self, order: Fetch) -> None:
        """Lets the pool have all that is known of some blocks."""
        self.place.memory.fetch(order.blocks, partial(self.emit, Fetched(order.number, self.stage)))

    @inference
    def run(self, step: Step) -> bool:
        """Runs one step to its end, done or aborted; emits its events, `StepDone` last.

        Returns:
            Whether its run goes on: `go_on` runs the next step of it, `run` another one.
        """
        masks = self.masks.begin(Wanted.of(step)) if self.masks is not None else None
        clocks = self._begin(step)
        self.place.memory.begin(step)
        if (run := self._begun_natively(step, masks)) is not None:
            assert run.native is not None
            self._make_masks(run)
            return self._natively(run, run.native, clocks)
        parts = [(it.token_ids, it.start, it.block_table) for it in step.sequences]
        full_hits = [index for index, it in enumerate(step.sequences) if it.full_hit]
        packed = PackedBatch.build(parts, self.place.memory.kv.shape[4], full_hits=full_hits)
        run = Run(step, packed, masks, self._tails(step), self.model.layer_begin, step.steps - 1)
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

    @inference
    def _step(self, run: Run, clocks: _Clocks) -> bool:
        done = self._received(run) and (self._layers(run) if run.shape is None else self._graph(run))
        if done and self.model.is_last:
            self.place.lane.run(partial(self._choose, run))
        self.place.lane.mark().wait()
        if not done:
            run.found = Found()
        following = self._begin_following(run, done=done)
        # Sent whatever has happened, so that the next stage knows.
        self.links.send(run.step.step_id, run.hidden if done else None)
        share = self._share(run, clocks)
        if run.followed is not None:
            run.followed.wait()
        return self._over(run, clocks, share, following, done=done)

    def _natively(self, run: Run, native: NativeRun, clocks: _Clocks) -> bool:
        """Steps of a run in one call, on a plain CPU: nothing else that is done for a step is left."""
        assert run.choosing is not None
        if native.alone and run.masks is not None:
            run.found = run.choosing.permit(run.masks)
        came, memory = native.go_on(*run.together(clocks.began_ns)), self.place.memory
        if came.filled:
            memory.go_on((), came.filled)
            for layer in range(self.model.layer_begin, self.model.layer_end):
                memory.leave(layer, None)
        run.left -= came.steps + came.stopped - 1
        if not native.alone:
            run.found = Found() if came.stopped else run.choosing.choose_from(native.logits_at, run.masks)
        share = self._share(run, clocks, came.steps + came.stopped)
        if native.alone:
            clocks = self._tell(run, native, came, clocks, share)
        return self._over(run, clocks, share, self._begin_following(run, done=not came.stopped), done=not came.stopped)

    def _tell(self, run: Run, native: NativeRun, came: Done, clocks: _Clocks, share: float) -> _Clocks:
        """Reports all but the last step of a call; `run.found` and the times returned are the last one's."""
        assert run.choosing is not None
        odd, last = bool(run.found.failed or run.found.awaited_ns), came.steps + came.stopped - 1
        for index, (tokens, over_ns) in enumerate(native.tokens(came.steps)):
            run.found = Found(list(tokens))
            if index < last:
                self._report(run, run.found, clocks, share, over_ns, aborted=False, over=False)
                clocks = clocks._replace(start_ns=over_ns, began_ns=over_ns)
        if came.stopped:
            run.found = Found()
        elif native.failed or odd:
            run.found = run.choosing.found_alone(run.masks)
        return clocks

    def _make_masks(self, run: Run) -> None:
        """On a plain CPU before the layers; on a device the sampler makes them while it computes."""
        if run.masks is not None and self.place.device is None:
            run.masks.early()

    def _begin_following(self, run: Run, *, done: bool) -> list[int] | None:
        """The tokens of the run's next step, whose masks are begun; None where it is over."""
        following = run.following() if done and not self.gates.is_cut(run.step.step_id) else None
        if following is not None and self.masks is not None:
            run.masks = self.masks.go_on(following)
        return following

    def _over(self, run: Run, clocks: _Clocks, share: float, following: list[int] | None, *, done: bool) -> bool:
        """Reports the step; whether its run goes on."""
        self._following = None if following is None else (run, following)
        if following is None:
            # Gates are done before the report: its receiver may open gates of the next step at once.
            self.gates.done(run.step.step_id)
        report = partial(self._report, run, run.found, clocks, share, 0, aborted=not done, over=following is None)
        self.place.memory.over(report, aborted=not done)
        return following is not None

    def _received(self, run: Run) -> bool:
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

    def _layers(self, run: Run) -> bool:
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

    def _given(self, run: Run, watch: Watch | None, progress: Progress | None) -> bool:
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

    def _begun_natively(self, step: Step, masks: Making | None) -> Run | None:
        """A run whose first step is like the further ones, so that native calls take it, too; None where it is not."""
        if step.steps == 1 or not self.model.native or not all(map(_like_further, step.sequences)):
            return None
        if masks is not None and masks.waits:  # for grammars, which are compiled beside the layers of a first step
            return None
        # As the step before left it: native code begins with each sequence's next token.
        parts = [(it.token_ids, it.start - 1, it.block_table) for it in step.sequences]
        packed = PackedBatch.build(parts, self.place.memory.kv.shape[4])
        run = Run(step, packed, masks, None, self.model.layer_begin, step.steps - 1)
        run.choosing = Choosing(self.model, step, self.gates.dropped(step.step_id))
        run.choosing.begin_with(packed.arrays["token_ids"].tolist())
        run.native = self._native(run, step.steps)
        return None if run.native is None else run

    def _native(self, run: Run, steps: int) -> NativeRun | None:
        """What computes so many steps of a run, each in one call; None where they go one operation at a time."""
        step, choosing = run.step, run.choosing
        plain = self.place.device is None and not step.gated and not step.layer_events
        if not plain or choosing is None or choosing.chosen is None or len(step.sequences) != run.packed.num_tokens:
            return None
        memory, watch = self.place.memory, self.gates.watch(step.step_id, gated=False)
        native = self.model.going_on(
            run.packed, memory.kv, steps, choosing.chosen, scales=memory.scales, out=choosing.logits, watch=watch
        )
        if native is not None:
            native.choose_by(choosing.alone, run.ends)
        return native

    def _graph(self, run: Run) -> bool:
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

    def _take_over(self, run: Run) -> None:
        run.hidden = run.hidden.to(self.place.torch_device)

    def _embed(self, run: Run) -> None:
        run.hidden = self.model.embed(run.batch.token_ids)

    def _run_layers(self, first: int, last: int, run: Run, watch: Watch | None, progress: Progress | None) -> None:
        tails, memory = run.tails if last == self.model.layer_end else None, self.place.memory
        run.layer, run.hidden = self.model.run(
            run.hidden, run.batch, memory.kv, first, last,
            scales=memory.scales, tails=tails, watch=watch, progress=progress,
        )  # fmt: skip

    def _replay(self, run: Run) -> None:
        assert self.graphs is not None
        assert run.shape is not None
        run.hidden = self.graphs.run(run.shape, run.batch, run.hidden)

    def _choose(self, run: Run) -> None:
        if run.choosing is None:
            run.choosing = Choosing(self.model, run.step, self.gates.dropped(run.step.step_id))
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

    def _begin(self, step: Step) -> _Clocks:
        """Gives way first where the step is patient."""
        start_ns = time.monotonic_ns()
        if step.patient:
            self.give_way(partial(self.gates.is_urgent, step.step_id))
        return _Clocks(start_ns, time.monotonic_ns(), time.thread_time_ns())

    def _share(self, run: Run, clocks: _Clocks, steps: int = 1) -> float:
        """Of the cores that was had since a step began, and in the steps behind it."""
        return self.share(steps) * self._ran(run.step, clocks, run.found.awaited_ns)

    def _ran(self, step: Step, clocks: _Clocks, awaited_ns: int) -> float:
        """Which share of the time since a step began to compute this thread ran: else something else had its core.

        Time in which it waited for grammars is left out. 1 where it may have waited for something else than cores and
        them: other stages, a device, a gate.
        """
        alone = self.model.is_first and self.model.is_last and self.place.device is None and not step.gated
        took_ns = time.monotonic_ns() - clocks.began_ns - awaited_ns
        return min(1.0, (time.thread_time_ns() - clocks.ran_ns) / took_ns) if alone and took_ns else 1.0

    def _report(
        self, run: Run, found: Found, clocks: _Clocks, share: float, end_ns: int, *, aborted: bool, over: bool
    ) -> None:
        """`end_ns`: 0 = now."""
        done = StepDone(
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
