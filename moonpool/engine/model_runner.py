"""Runs steps on one pipeline stage, one after the other."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from moonpool.base.errors import MoonpoolError
from moonpool.base.scheduling.steps import Step
from moonpool.engine.graph_run import GraphRun
from moonpool.engine.layer_run import LayerRun
from moonpool.engine.messages import (
    BlocksFetched,
    DropLora,
    FetchBlocks,
    KVLoaded,
    LoadKV,
    LoadLora,
    LoraAnswer,
    WorkerFailed,
)
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.lora import load_lora
from moonpool.engine.native_run import NativeRun
from moonpool.engine.run_mode import RunMode, StageParts
from moonpool.engine.step_run import StepRun, StepStart
from moonpool.engine.structured_output import MaskRequest, PendingMasks


@dataclass(slots=True)
class StageRunner(StageParts):
    """Runs steps on one stage, each in the mode that suits the step."""

    _native: NativeRun = field(init=False, repr=False)
    _layers: LayerRun = field(init=False, repr=False)
    _graphs: GraphRun = field(init=False, repr=False)
    _next: tuple[StepRun, list[int]] | None = field(init=False, default=None)
    """The continuing run, with the next tokens."""

    def __post_init__(self) -> None:
        self._native, self._layers, self._graphs = NativeRun(self), LayerRun(self), GraphRun(self)

    @in_inference_mode
    def run(self, step: Step) -> bool:
        """Run one step to the end, done or aborted; emit the step's events, `StageDone` last.

        Returns:
            Whether the step's run continues. Then `go_on` runs the run's next step.
        """
        masks = self._begin_masks(step)
        times = self.begin(step)
        self.platform.memory.begin(step)
        mode: RunMode = self._native
        run = mode.begin(step, masks)
        if run is None:
            mode = self._on_stream
            run = mode.begin(step, masks)
            assert run is not None
        self._make_masks(run)
        return self._compute(mode, run, times)

    def go_on(self) -> bool:
        """Run the next step of the run; see `run`. Native calls need no inference mode, and entering takes time."""
        assert self._next is not None
        run, tokens = self._next
        times = self.begin(run.step)
        self._make_masks(run)
        mode = self._native if self._native.takes(run) else self._on_stream
        mode.advance(run, tokens)
        return self._compute(mode, run, times)

    @property
    def _on_stream(self) -> RunMode:
        return self._layers if self.graphs is None and self.prompt_graphs is None else self._graphs

    def _compute(self, mode: RunMode, run: StepRun, times: StepStart) -> bool:
        following = mode.compute(run, times)
        self._next = None if following is None else (run, following)
        return following is not None

    def _begin_masks(self, step: Step) -> PendingMasks | None:
        if self.masks is None:
            return None
        wanted = MaskRequest.of(step)
        if self.model.config.decoder.recurrent and not self.model.is_first:
            # The stages before have the token in their states, and would not take it back.
            wanted = [replace(request, may_skip=False) for request in wanted]
        return self.masks.begin(wanted, alone=sum(request.may_skip for request in wanted) == len(step.sequences))

    def _make_masks(self, run: StepRun) -> None:
        """Make masks before the layers on a plain CPU; on a device the sampler makes them while the device computes."""
        if run.pending_masks is not None and self.platform.device is None:
            run.pending_masks.early()

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
                Path(order.folder), order.lora, self.model.whole, self.model.layers, self.model.layer_begin,
                max_rank=self.max_lora_rank, ranks=self.model.ranks, slots=self.model.lora_slots,
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
        lora = self.loras.pop(order.lora, None)
        if lora is not None and self.model.lora_slots is not None:
            self.model.lora_slots.give_back(lora.slot)
        self.emit(LoraAnswer(order.number, self.stage))
