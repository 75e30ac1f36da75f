"""One stage's share of one step: layer by layer, behind gates, with events, and at the end what its tokens are.

Work is given to the device's computing lane, which does it at once on a plain CPU and later elsewhere. So nothing here
looks at a tensor before the lane has come to it, and what follows from a layer is told by the stage's KV memory.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moonpool.engine.captures import GraphShape
from moonpool.engine.choosing import Found, choose
from moonpool.engine.devices.opening import Place
from moonpool.engine.gates import Gates, Watch
from moonpool.engine.graphs import DecodeGraphs
from moonpool.engine.masks import Mask, Masks
from moonpool.engine.messages import Fetch, Fetched, StepDone
from moonpool.engine.pipeline import Links
from moonpool.model.batch import PackedBatch
from moonpool.model.stage import StageModel
from moonpool.sched.steps import LayerDone, Step


@dataclass(slots=True)
class _Work:
    """A step's tensors, which belong to the computing lane, and what comes of them."""

    batch: PackedBatch
    hidden: Tensor  # [T, hidden]; on the first stage nothing before the embedding
    layer: int  # that it has come to
    shape: GraphShape | None  # of the graph that all its layers are; then the batch is on the host
    found: Found = field(default_factory=Found)


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
    give_way: Callable[[], None] = lambda: None
    """Called in the beginning of a patient step."""
    share: Callable[[], float] = lambda: 1.0
    """Which share of the cores that it wanted this process had since it was asked before (`moonpool.engine.cores`)."""
    graphs: DecodeGraphs | None = None
    """Of decode steps; None = all run layer by layer."""

    def close(self) -> None:
        """Waits until everything sent has been received, and ends the stage's threads."""
        self.links.flush()
        self.place.close()
        if self.masks is not None:
            self.masks.close()

    def fetch(self, order: Fetch) -> None:
        """Lets the pool have all that is known of some blocks."""
        self.place.memory.fetch(order.blocks, partial(self.emit, Fetched(order.number, self.stage)))

    @torch.inference_mode()
    def run(self, step: Step) -> Step | None:
        """Runs one step to its end, done or aborted; emits its events, `StepDone` last.

        Returns:
            The next one of its run, None when the run is over.
        """
        start_ns = time.monotonic_ns()
        if step.patient:
            self.give_way()
        began = time.monotonic_ns(), time.thread_time_ns()
        memory = self.place.memory
        memory.begin(step)
        masks = self.masks.begin(step) if self.masks is not None else None
        work = self._received(step)
        done = work is not None and (self._layers(step, work) if work.shape is None else self._graph(step, work))
        if work is not None and done and self.model.is_last:
            self.place.lane.run(partial(self._choose, step, work, masks))
        self.place.lane.mark().wait()
        # Sent whatever has happened, so that the next stage knows.
        self.links.send(step.step_id, work.hidden if work is not None and done else None)
        found = work.found if work is not None and done else Found()
        following = step.after(found.sampled) if done and not self.gates.is_cut(step.step_id) else None
        if following is None:
            # Gates are done before the report: its receiver may open gates of the next step at once.
            self.gates.done(step.step_id)
        share = self.share() * self._ran(step, *began)
        report = partial(self._report, step, found, start_ns, share, aborted=not done, over=following is None)
        memory.over(report, aborted=not done)
        return following

    def _received(self, step: Step) -> _Work | None:
        """The batch, with the hidden states of the stage before; None when that has aborted the step."""
        parts = [(it.token_ids, it.start, it.block_table) for it in step.sequences]
        size, full_hits = self.place.memory.kv.shape[4], [i for i, it in enumerate(step.sequences) if it.full_hit]
        shape = self.graphs.shape(step) if self.graphs is not None else None
        where = self.place.torch_device if shape is None else "cpu"
        batch = PackedBatch.build(parts, size, where, full_hits=full_hits)
        if self.model.is_first:
            work = _Work(batch, torch.empty(0), self.model.layer_begin, shape)
            if shape is None:
                self.place.lane.run(partial(self._embed, work))
            return work
        hidden = self.links.receive(step.step_id, batch.num_tokens)
        if hidden is None:
            return None
        work = _Work(batch, hidden, self.model.layer_begin, shape)
        self.place.lane.run(partial(self._take_over, work))
        return work

    def _layers(self, step: Step, work: _Work) -> bool:
        """Gives all layers of this stage to the lane; False when the step was aborted before the last.

        On a plain CPU, where work is done when it is given, they go together as far as gates are open, unless each is
        told.
        """
        place, layer, end, tails = self.place, self.model.layer_begin, self.model.layer_end, self._tails(step)
        watch = None
        if place.device is None and not step.layer_events:
            watch = self.gates.watch(step.step_id, gated=step.gated)
        while layer < end:
            if step.gated and not self.gates.wait(step.step_id, layer, self.gate_timeout_s):
                return False
            if self.gates.aborted(step.step_id):
                return False
            start_ns = time.monotonic_ns()
            last = layer + 1 if watch is None else end
            for its in range(layer, last):
                place.memory.need(its)
            place.lane.run(partial(self._run_layers, layer, last, tails, work, watch))
            came = last if watch is None else work.layer
            for its in range(layer, came):
                told = partial(self._layer_done, step.step_id, its, start_ns) if step.layer_events else None
                place.memory.leave(its, told)
            layer = came
        return True

    def _graph(self, step: Step, work: _Work) -> bool:
        """Gives all layers of this stage to the lane as one graph; False when the step was aborted before."""
        if self.gates.aborted(step.step_id):
            return False
        layers, memory = range(self.model.layer_begin, self.model.layer_end), self.place.memory
        for layer in layers:
            memory.need(layer)
        self.place.lane.run(partial(self._replay, work))
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

    def _take_over(self, work: _Work) -> None:
        work.hidden = work.hidden.to(self.place.torch_device)

    def _embed(self, work: _Work) -> None:
        work.hidden = self.model.embed(work.batch.token_ids)

    def _run_layers(self, first: int, last: int, tails: list[int] | None, work: _Work, watch: Watch | None) -> None:
        wanted, memory = tails if last == self.model.layer_end else None, self.place.memory
        work.layer, work.hidden = self.model.run(
            work.hidden, work.batch, memory.kv, first, last, scales=memory.scales, tails=wanted, watch=watch
        )

    def _replay(self, work: _Work) -> None:
        assert self.graphs is not None
        assert work.shape is not None
        work.hidden = self.graphs.run(work.shape, work.batch, work.hidden)

    def _choose(self, step: Step, work: _Work, masks: Future[dict[int, Mask]] | None) -> None:
        dropped = self.gates.dropped(step.step_id)
        work.found = choose(self.model, step, work.hidden, work.batch, dropped, masks)

    # --- when it is done -------------------------------------------------------------------------------------------

    def _layer_done(self, step_id: int, layer: int, start_ns: int) -> None:
        self.emit(LayerDone(step_id, layer, start_ns, time.monotonic_ns()))

    def _ran(self, step: Step, began_ns: int, ran_ns: int) -> float:
        """Which share of the time since a step began to compute this thread ran: else something else had its core.

        1 where it may have waited for something other than cores: other stages, a device, a gate.
        """
        alone = self.model.is_first and self.model.is_last and self.place.device is None and not step.gated
        took_ns = time.monotonic_ns() - began_ns
        return min(1.0, (time.thread_time_ns() - ran_ns) / took_ns) if alone and took_ns else 1.0

    def _report(self, step: Step, found: Found, start_ns: int, share: float, *, aborted: bool, over: bool) -> None:
        self.emit(
            StepDone(
                step.step_id,
                self.stage,
                tuple(found.sampled),
                aborted,
                start_ns,
                time.monotonic_ns(),
                several=found.several,
                logprobs=found.logprobs,
                scores=found.scores,
                failed=found.failed,
                over=over,
                share=share,
            )
        )
