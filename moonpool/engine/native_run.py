"""The mode that takes steps in native calls, from the last step's tokens to the next, or further, on a plain CPU."""

from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.native_loop import NativeLoop, RunResult
from moonpool.engine.run_mode import RunMode
from moonpool.engine.step_run import StepRun, StepStart
from moonpool.engine.step_sampler import StepOutput, StepSampler
from moonpool.engine.structured_output import PendingMasks


class NativeRun(RunMode):
    """Computes decode steps of models that native kernels compute whole."""

    def begin(self, step: Step, masks: PendingMasks | None) -> StepRun | None:
        """Return a run whose first step is like the later steps, so that native calls take the step; else None."""
        if step.steps == 1 or not self._stage.model.native or not all(map(_like_further, step.sequences)):
            return None
        if masks is not None and masks.waits:  # for grammars, which are compiled beside the layers of a first step
            return None
        # As left by the step before: native code begins with each sequence's next token.
        parts = [(part.token_ids, part.start - 1, part.block_table) for part in step.sequences]
        packed = PackedBatch.build(parts, self._stage.platform.memory.block_size)
        self._add_loras(step.sequences, packed)
        self._add_rope_positions(step.sequences, packed)
        run = StepRun(step, packed, masks, None, self._stage.model.layer_begin, step.steps - 1)
        run.sampler = StepSampler(self._stage.model, step, self._stage.kv_gates.dropped(step.step_id))
        run.sampler.set_previous(packed.arrays["token_ids"].tolist())
        run.native = self._loop(run, step.steps)
        return None if run.native is None else run

    def takes(self, run: StepRun) -> bool:
        """Tell whether native calls compute the rest of a run, from the next step on."""
        if run.native is None:
            run.native = self._loop(run, run.left)
        return run.native is not None

    def advance(self, run: StepRun, tokens: list[int]) -> None:
        assert run.sampler is not None
        assert run.native is not None
        if not run.native.samples:
            run.sampler.advance(tokens)
        run.advance(self._stage.model.layer_begin)

    def compute(self, run: StepRun, times: StepStart) -> list[int] | None:
        native = run.native
        assert native is not None
        assert run.sampler is not None
        if native.samples and run.pending_masks is not None:
            run.output = run.sampler.set_masks(run.pending_masks)
        came, memory = native.go_on(*run.batch_limits(times.began_ns)), self._stage.platform.memory
        if came.filled:
            memory.advance((), came.filled)
            for layer in range(self._stage.model.layer_begin, self._stage.model.layer_end):
                memory.finish_layer(layer, None)
        run.left -= came.steps + came.stopped - 1
        if not native.samples:
            run.output = StepOutput() if came.stopped else run.sampler.sample_from(native.logits_at, run.pending_masks)
        share = self._cpu_share(run, times, came.steps + came.stopped)
        if native.samples:
            times = self._report_steps(run, native, came, times, share)
        return self._finish(run, times, share, self._begin_next(run, done=not came.stopped), done=not came.stopped)

    def _report_steps(
        self, run: StepRun, native: NativeLoop, came: RunResult, times: StepStart, share: float
    ) -> StepStart:
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

    def _loop(self, run: StepRun, steps: int) -> NativeLoop | None:
        """Return the native loop for `steps` steps of a run; None if Python runs them."""
        step, sampler = run.step, run.sampler
        plain = self._stage.platform.device is None and not step.gated and not step.layer_events
        if (
            not plain
            or sampler is None
            or sampler.tokens_address is None
            or len(step.sequences) != run.packed.num_tokens
        ):
            return None
        memory, signals = self._stage.platform.memory, self._stage.kv_gates.signals(step.step_id, gated=False)
        native = self._stage.model.native_run(
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


def _like_further(sequence: SequenceStep) -> bool:
    """Tell whether a sequence's part of a run's first step is one token after others, as in later steps."""
    plain = sequence.scored is None and not sequence.full_hit and not sequence.media
    return len(sequence.token_ids) == 4 and sequence.start > 0 and plain
