"""The mode that gives layers to the compute stream, one by one or together, and then samples the tokens."""

import time
from collections.abc import Sequence
from functools import partial

from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step
from moonpool.engine.cuda_graphs import GraphShape
from moonpool.engine.kv_gate import StepState
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.native_step import Progress
from moonpool.engine.models.stage import LOGITS, SAMPLED
from moonpool.engine.models.whole_pictures import PictureRows, with_rests
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.prompt_graphs import ChunkShape
from moonpool.engine.run_mode import RunMode
from moonpool.engine.step_run import StepRun, StepStart
from moonpool.engine.step_sampler import StepOutput, StepSampler
from moonpool.engine.structured_output import PendingMasks


class LayerRun(RunMode):
    """Computes any step, on any device, with KV gates and events for each layer."""

    def begin(self, step: Step, masks: PendingMasks | None) -> StepRun:
        sequences, pictures = self._with_rests(step)
        parts = [(part.token_ids, part.start, part.block_table) for part in sequences]
        full_hits = [index for index, part in enumerate(sequences) if part.full_hit]
        memory = self._stage.platform.memory
        packed = PackedBatch.build(parts, memory.block_size, full_hits=full_hits, slot_of=memory.slot_of)
        packed.pictures = pictures
        self._add_loras(sequences, packed)
        self._add_rope_positions(sequences, packed)
        last_rows = self._last_rows(sequences)
        return StepRun(step, packed, masks, last_rows, self._stage.model.layer_begin, step.steps - 1)

    def advance(self, run: StepRun, tokens: list[int]) -> None:
        if run.sampler is not None and run.ahead is None:  # the first rank's
            run.sampler.advance(tokens)
        run.packed = run.batch = run.packed.after(tokens)
        run.advance(self._stage.model.layer_begin)
        self._stage.platform.memory.advance(run.packed.block_ids.tolist(), run.packed.filled())

    @in_inference_mode
    def compute(self, run: StepRun, times: StepStart) -> list[int] | None:
        # Now: a step may be given up before its first layer.
        self._stage.platform.stream.run(self._stage.model.undo.begin)
        done = self._receive(run) and self._compute(run)
        if done and self._stage.model.is_last and self._first:
            self._stage.platform.stream.run(partial(self._choose, run))
        self._stage.platform.stream.record().wait()
        if not done or run.output.late:  # their tokens are computed again
            self._stage.platform.stream.run(partial(self._stage.model.undo.restore, run.output.late if done else None))
        if not done:
            run.output = StepOutput()
        following = self._begin_next(run, done=done) if self._first else None
        if done and self._stage.model.is_last and self._stage.model.ranks is not None:
            following = self._agree(self._stage.model.ranks, following)
        # Sent whatever has happened, so that the next stage knows.
        self._stage.links.send(run.step.step_id, run.hidden if done else None)
        return self._finish(run, times, self._cpu_share(run, times), following, done=done)

    @property
    def _first(self) -> bool:
        """Whether this process decides and samples for the stage."""
        return self._stage.model.ranks is None or self._stage.model.ranks.first

    def _agree(self, ranks: Ranks, following: list[int] | None) -> list[int] | None:
        """Return the tokens of the run's next step as the first rank knows them; None: the run is over."""
        if ranks.first:
            ranks.tell([SAMPLED, *(following or ())])
            return following
        stream = self._stage.platform.stream
        while (words := ranks.hear())[0] == LOGITS:
            stream.run(partial(self._stage.model.assist, words[1]))
            stream.record().wait()
        return words[1:] or None

    def _decided(self, *words: bool) -> list[bool]:
        """Return the first rank's decisions for the stage: its own `words`."""
        ranks = self._stage.model.ranks
        if ranks is not None and not ranks.first:
            return list(map(bool, ranks.hear()))
        if ranks is not None:
            ranks.tell(list(map(int, words)))
        return list(words)

    def _receive(self, run: StepRun) -> bool:
        """Bring batch and hidden states to the device; return False if the stage before aborted the step."""
        run.shape = self._shape(run)
        if run.shape is None and self._stage.platform.torch_device.type != "cpu":
            self._stage.platform.stream.run(partial(self._move_batch, run))
        if self._stage.model.is_first:
            if run.shape is None:  # graphs have the embedding in them
                self._stage.platform.stream.run(partial(self._embed, run))
            return True
        hidden = self._stage.links.receive(run.step.step_id, run.packed.num_tokens)
        if hidden is None:
            return False
        run.hidden = hidden
        self._stage.platform.stream.run(partial(self._move_hidden, run))
        return True

    def _shape(self, run: StepRun) -> GraphShape | ChunkShape | None:
        """Return the shape of the graphs that compute the step; None: layers are launched."""
        del run
        return None

    def _compute(self, run: StepRun) -> bool:
        """Give all layers of this stage to the stream; return False if the step was aborted before the last.

        On a plain CPU, which computes at once, layers go together as far as gates are open. If each is reported, the
        callback thread follows them.
        """
        step, cpu = run.step, self._stage.platform.device is None
        progress = self._stage.model.progress(run.batch.loras) if cpu and step.layer_events else None
        # Ranks do not go apart: each layer is computed by all of them, or by none.
        alone = cpu and self._stage.model.by_layers and self._stage.model.ranks is None
        together = alone and (progress is not None or not step.layer_events) and not self._is_taken_in(run)
        signals = self._stage.kv_gates.signals(step.step_id, gated=step.gated) if together else None
        if progress is None:
            return self._give_layers(run, signals, None)
        run.reported = self._stage.platform.callbacks.send(partial(self._follow, step.step_id, progress))
        try:
            return self._give_layers(run, signals, progress)
        finally:
            progress.end()

    def _give_layers(self, run: StepRun, signals: StepState | None, progress: Progress | None) -> bool:
        """As `_compute`; together if there are signals, or the model has no layers apart."""
        step, platform, model = run.step, self._stage.platform, self._stage.model
        layer, end = model.layer_begin, model.layer_end
        while layer < end:
            gate = layer if model.by_layers else end - 1
            # A model without layers apart reads all KV in one call, so that the call waits for the last layer's gate.
            if not self._may_compute(run, gate):
                return False
            start_ns = time.monotonic_ns()
            last = layer + 1 if signals is None and model.by_layers else end
            for number in range(layer, last):
                platform.memory.prepare_layer(number)
            platform.stream.run(partial(self._compute_layers, layer, last, run, signals, progress))
            came = last if signals is None else run.layer
            for number in range(layer, came) if progress is None else ():
                report = partial(self._layer_done, step.step_id, number, start_ns) if step.layer_events else None
                platform.memory.finish_layer(number, report)
            layer = came
        return True

    def _may_compute(self, run: StepRun, gate: int) -> bool:
        """Wait for a layer's gate; return whether the step goes on. The first rank decides for the others."""
        if self._is_taken_in(run):
            return True
        step, gates = run.step, self._stage.kv_gates
        goes_on = not (self._first and step.gated) or gates.wait(step.step_id, gate, self._stage.gate_timeout_s)
        return self._decided(goes_on and not gates.aborted(step.step_id))[0]

    def _is_taken_in(self, run: StepRun) -> bool:
        """Tell whether the stages before have the step's tokens in recurrent states, and could not take them back."""
        model = self._stage.model
        later = not model.is_first and model.config.decoder.recurrent
        return later and not run.step.gated and within_blocks(run.packed)

    def _with_rests(self, step: Step) -> tuple[Sequence[SequenceStep], Sequence[PictureRows]]:
        """Return the sequences whose rows are computed, and rows whose attention is that of whole pictures."""
        if self._stage.model.config.decoder.whole_pictures and any(part.media for part in step.sequences):
            return with_rests(step.sequences, self._stage.platform.memory.block_size)
        return step.sequences, ()

    def _last_rows(self, sequences: Sequence[SequenceStep]) -> list[int] | None:
        """Return each sequence's number of last rows that are needed after the last layer; None: all rows."""
        if not self._stage.model.is_last:
            return None
        return [
            len(part.token_ids) // 4 if part.scored is not None else int(part.sample is not None) for part in sequences
        ]

    # --- in the stream ---------------------------------------------------------------------------------------------

    def _move_batch(self, run: StepRun) -> None:
        run.batch = run.packed.to(self._stage.platform.torch_device)

    def _move_hidden(self, run: StepRun) -> None:
        run.hidden = run.hidden.to(self._stage.platform.torch_device)

    def _embed(self, run: StepRun) -> None:
        run.hidden = self._stage.model.embed(run.batch.token_ids, run.batch.positions)
        encoder, begins = self._stage.model.pictures, run.left == run.step.steps - 1
        if begins and run.has_media:
            assert encoder is not None, "requests with pictures are refused elsewhere"
            encoder.place(run.hidden, self._with_rests(run.step)[0], run.batch)
            run.pictures = encoder.take_placed()

    def _compute_layers(
        self, first: int, last: int, run: StepRun, signals: StepState | None, progress: Progress | None
    ) -> None:
        last_rows, memory = run.last_rows if last == self._stage.model.layer_end else None, self._stage.platform.memory
        run.layer, run.hidden = self._stage.model.run(
            run.hidden, run.batch, memory.kv, first, last,
            scales=memory.scales, last_rows=last_rows, signals=signals, progress=progress,
        )  # fmt: skip

    def _choose(self, run: StepRun) -> None:
        if run.sampler is None:
            run.sampler = StepSampler(self._stage.model, run.step, self._stage.kv_gates.dropped(run.step.step_id))
        run.output = run.sampler.choose(run.hidden, run.batch, run.pending_masks)

    # --- in the callback thread ------------------------------------------------------------------------------------

    def _follow(self, step_id: int, progress: Progress) -> None:
        """Finish each layer once computed; end with the first that is not."""
        for layer in range(self._stage.model.layer_begin, self._stage.model.layer_end):
            if not progress.wait(layer):
                return
            self._stage.platform.memory.finish_layer(
                layer, partial(self._layer_done, step_id, layer, progress.began_ns(layer))
            )

    def _layer_done(self, step_id: int, layer: int, start_ns: int) -> None:
        self._stage.emit(LayerDone(step_id, layer, start_ns, time.monotonic_ns()))


def within_blocks(batch: PackedBatch) -> bool:
    """Tell whether a sequence of a batch, on the host, begins within a block."""
    return bool((batch.positions[batch.query_start[:-1].long()] % batch.block_size).any())
