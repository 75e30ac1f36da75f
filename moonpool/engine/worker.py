"""An engine process: `python -P -m moonpool.engine.worker --channel FD --pool FD`, started by the I/O process only.

The process takes orders from the channel and exits when the channel closes. Torch is imported after the receiving
thread has started, so that the process ends with its parent even while importing.
"""

import argparse
import contextlib
import gc
import os
import queue
import resource
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.families.spec import described_ways
from moonpool.base.fork_server import preloaded_bytes
from moonpool.base.scheduling.steps import Step
from moonpool.engine.channel import BlockingChannel, ChannelClosed
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import (
    MAX_FETCHES,
    AbortStageStep,
    DropLora,
    DropSequence,
    EngineSizes,
    EngineSpec,
    FetchBlocks,
    Footprint,
    LayersLoaded,
    LoadKV,
    LoadLora,
    OpenKVGateMessage,
    Shutdown,
    StageRoom,
    StageSpec,
    StageStarting,
    StopRunMessage,
    WorkerFailed,
    WorkerReady,
)
from moonpool.engine.platforms.registry import collectives_of, stage_devices

if TYPE_CHECKING:
    from moonpool.engine.model_runner import StageRunner
    from moonpool.engine.models.stage import StageModel
    from moonpool.engine.pipeline import Links
    from moonpool.engine.platforms.stage_platform import StagePlatform
    from moonpool.engine.structured_output import MaskBuilder


_ORPHANED = 70  # exit code when the channel closed under us
_FAILED = 1


class OrderReceiver:
    """Reads the channel in a separate thread, so that gates, aborts and the parent's death are noticed at any time."""

    def __init__(self, channel: BlockingChannel, gates: KVGates, engine: EngineSpec, rendezvous: str) -> None:
        # The parent never has more than `stages` steps in flight, so many fetches, and one order for each adapter; one
        # more place is for Shutdown.
        places = engine.stages + MAX_FETCHES + engine.max_loras + 1
        self.orders: queue.Queue[Step | FetchBlocks | DropLora | Shutdown | EngineSizes] = queue.Queue(places)
        self._channel = channel
        self._gates = gates
        self._rendezvous = rendezvous
        self.load: Callable[[LoadKV], None] = lambda order: None
        """Brings KV to the device; set before the stage is ready."""
        self.load_lora: Callable[[LoadLora], None] = lambda order: None
        """Loads an adapter, in a thread of its own; set before the stage is ready."""

    def start(self) -> None:
        """Start the thread; the thread ends with the process."""
        threading.Thread(target=self._run, name="receiver", daemon=True).start()

    def next_order(self, *, wait: bool) -> Step | FetchBlocks | DropLora | Shutdown | EngineSizes | None:
        """Return the next order; None without a waiting order, if not `wait`.

        There is no deadline: the process ends when the channel closes.
        """
        try:
            return self.orders.get(block=wait)
        except queue.Empty:
            return None

    def _run(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, OpenKVGateMessage):
                    self._gates.open(message.step_id, message.layer)
                elif isinstance(message, DropSequence):
                    self._gates.drop(message.step_id, message.index)
                elif isinstance(message, StopRunMessage):
                    self._gates.stop_run(message.step_id, urgent=message.urgent)
                elif isinstance(message, AbortStageStep):
                    self._gates.abort(message.step_id)
                elif isinstance(message, LoadKV):
                    self.load(message)
                elif isinstance(message, LoadLora):
                    threading.Thread(target=self.load_lora, args=(message,), name="lora", daemon=True).start()
                else:
                    self.orders.put_nowait(message)
        except ChannelClosed:
            # The I/O process has ended. The computing thread may be blocked in a collective: exit at once.
            if self._rendezvous:
                shutil.rmtree(self._rendezvous, ignore_errors=True)
        except BaseException:
            traceback.print_exc()
        os._exit(_ORPHANED)


class StageLoader:
    """Builds one stage's runner, part by part. Torch is imported with the first of them.

    Args:
        spec: the stage's.
        pool_fd: descriptor for the stage's part of the KV pool.
        gates: KV gates for the stage's steps.
        channel: to the I/O process.
        sizes: waits for the answer to `StageRoom`.
    """

    def __init__(
        self,
        spec: StageSpec,
        pool_fd: int,
        gates: KVGates,
        channel: BlockingChannel,
        sizes: Callable[[], EngineSizes],
    ) -> None:
        import torch

        from moonpool.base.checkpoint.formats import load_config
        from moonpool.base.kv.pool import PoolPart
        from moonpool.engine.footprint import resident_bytes
        from moonpool.engine.kernels.native import library
        from moonpool.engine.platforms.stage_platform import open_device

        self.spec, self.engine, self.gates, self.channel = spec, spec.engine, gates, channel
        self.libraries_bytes = max(resident_bytes(), preloaded_bytes())
        channel.send(StageStarting("loading weights"))
        torch.set_num_threads(max(1, self.engine.threads))
        torch.set_num_interop_threads(1)
        self.config = load_config(Path(self.engine.checkpoint), self.engine.model_impl)
        self.devices = stage_devices(self.engine.device, self.engine.stages)
        self.device = open_device(self.devices[spec.stage])
        self.torch_device = torch.device("cpu") if self.device is None else self.device.torch_device
        if self.device is None:
            _build_kernels(channel)
        self.model = self._load_weights()
        if not self.engine.sized:
            self.engine = self._sized(sizes)
        self.part = PoolPart.attach(
            pool_fd, self.engine.layout, self.engine.blocks, spec.layer_begin, spec.layer_end, self.engine.slots
        )
        self.native = library.get() if self.model.native else None

    def load(self) -> "tuple[StageRunner, Footprint]":
        """Return the runner, and what the process will hold in memory.

        Raises:
            MoonpoolError: as `moonpool.engine.executor.start_engine` documents.
        """
        from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
        from moonpool.engine.footprint import max_rows, max_sequence_tokens
        from moonpool.engine.model_runner import StageRunner
        from moonpool.engine.warm_up import warm_up

        platform, footprint = self._open_platform()
        longest = max_sequence_tokens(self.config, self.engine)
        masks = self._mask_builder(footprint) if self.model.is_last else None
        timeout_s = self.engine.gate_timeout_s
        runner = StageRunner(
            self.spec.stage, self.model, platform, self._links(), self.gates, self.channel.send, timeout_s, masks
        )
        runner.max_lora_rank = self.engine.max_lora_rank
        if self.native is not None:
            had = self.native.had
            runner.cpu_share = lambda steps: had()
        # Experts, windows and the like look at tensors between launches, which a captured graph cannot do.
        if self.device is not None and self.engine.graph_rows and not self.config.decoder.not_plain:
            cache = GraphCache(longest, most_rows=self.engine.graph_rows)
            runner.graphs = DecodeGraphs(self.device, self.model, platform.memory, cache, longest)
        if self.device is not None:
            warm_up(runner, max_rows(self.engine), longest, lambda what: self.channel.send(StageStarting(what)))
        return runner, footprint

    def _sized(self, sizes: Callable[[], EngineSizes]) -> EngineSpec:
        """Tell what the device has room for; return the specification with the sizes that follow from all stages."""
        assert self.device is not None, "a plain CPU has no memory of its own"
        capacity = self.device.capacity()
        weights = self.model.weight_bytes
        self.channel.send(StageRoom(capacity.total, capacity.free, capacity.processors, weights))
        found = sizes()
        return replace(self.engine, blocks=found.blocks, max_num_batched_tokens=found.max_num_batched_tokens)

    def _load_weights(self) -> "StageModel":
        from moonpool.engine.footprint import release_memory
        from moonpool.engine.models.loader import load_stage, torch_dtype
        from moonpool.engine.models.tensor_reader import KeptWeights

        engine, spec = self.engine, self.spec
        file = Path(engine.weights_file) if engine.weights_file and self.device is None else None
        imatrix = Path(engine.imatrix) if engine.imatrix else None
        model = load_stage(
            Path(engine.checkpoint),
            self.config,
            torch_dtype(engine.dtype),
            spec.layer_begin,
            spec.layer_end,
            self.torch_device,
            deterministic=engine.deterministic,
            kept=KeptWeights(engine.quantization, engine.int8_head and self.device is None, file, imatrix),
            on_layer=lambda done, of: self.channel.send(LayersLoaded(done, of)),
        )
        release_memory()  # what was unpacked on the way
        return model

    def _open_platform(self) -> "tuple[StagePlatform, Footprint]":
        import torch

        from moonpool.engine.footprint import device_footprint, grammar_bytes, lora_bytes, work_bytes
        from moonpool.engine.platforms.stage_platform import stage_platform

        config, engine, model = self.config, self.engine, self.model
        loras = lora_bytes(config, engine, self.spec.layer_begin, self.spec.layer_end)
        sizes = device_footprint(config, engine, weights=model.weight_bytes, pool=self.part.nbytes, loras=loras)
        on_failure = partial(_end_process, self.channel)
        platform = stage_platform(self.device, self.part, on_failure, sizes.work + sizes.graphs + sizes.loras)
        work = work_bytes(config, engine, native=model.native, threads=torch.get_num_threads())
        formats = grammar_bytes(config) if model.is_last else 0
        held = None if self.device is None else sizes
        kv_bytes = platform.memory.host_bytes
        return platform, Footprint(self.libraries_bytes, model.weight_bytes, kv_bytes, work, formats, held, loras)

    def _links(self) -> "Links":
        import torch.distributed

        from moonpool.engine.models.loader import torch_dtype
        from moonpool.engine.pipeline import NoLinks, StageLinks

        engine = self.engine
        if engine.stages == 1:
            return NoLinks()
        return StageLinks(
            Path(self.spec.rendezvous),
            self.spec.stage,
            engine.stages,
            collectives_of(self.devices, torch.distributed.is_backend_available),
            device=self.torch_device,
            hidden_size=self.config.hidden_size,
            dtype=torch_dtype(engine.dtype),
            timeout_s=engine.step_timeout_s,
        )

    def _mask_builder(self, footprint: Footprint) -> "MaskBuilder":
        from moonpool.base.checkpoint import Tokenizer
        from moonpool.engine.footprint import near_memory_limit
        from moonpool.engine.structured_output import MaskBuilder

        path, full = Path(self.engine.checkpoint), partial(near_memory_limit, footprint.bound)
        aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if self.native is not None:
            aside = self.native.aside
        vocab_size, ends = self.config.vocab_size, self.config.eos_token_ids
        masks = MaskBuilder(lambda: Tokenizer.load(path), vocab_size, ends, aside, full)
        self.channel.send(StageStarting("preparing structured answers"))
        masks.warm()
        return masks


def _build_kernels(channel: BlockingChannel) -> None:
    """Build the native kernels if need be; say meanwhile that the start goes on."""
    from moonpool.base.native.build import BuildError, build
    from moonpool.engine.kernels.choice import VARIABLE

    if os.environ.get(VARIABLE, "native") in ("", "native"):
        with contextlib.suppress(BuildError):  # loading the library says why
            build(report=lambda what: channel.send(StageStarting(what)))


def import_libraries() -> None:
    """Import all that the engine needs, with the garbage collector off.

    Importing makes no garbage, and looking for garbage takes a tenth of the time.
    """
    gc.disable()
    import moonpool.engine.model_runner
    import moonpool.engine.models.loader
    import moonpool.engine.platforms.stage_platform  # noqa: F401

    gc.freeze()  # what stays for ever is not looked at again
    gc.enable()


def describe_compute(runner: "StageRunner") -> str:
    """Return what computes the stage's steps, for `WorkerReady`."""
    model, graphs = runner.model, "" if runner.graphs is None else "; decode steps as graphs"
    layers = described_ways(model.not_native, model.layer_begin)
    return f"{model.kernels}, {layers}{graphs}"


def step_turns(engine: EngineSpec, runner: "StageRunner") -> Callable[[], AbstractContextManager[None]]:
    """Return the context for each step: as many cores as are ours meanwhile (`moonpool.engine.cpu_sharing`).

    Native kernels check that themselves, before each region, and the `runner`'s patient steps give way to others.
    Torch's threads are set per step, unless results are to be the same whatever else runs.

    Raises:
        ConfigError: the page cannot be used.
    """
    import torch

    from moonpool.engine.cpu_sharing import SLOTS, CpuSlot, StepTurns, default_core_page
    from moonpool.engine.kernels.native import library

    if not engine.core_page:
        return contextlib.nullcontext
    try:
        cores = CpuSlot.claim(Path(engine.core_page), engine.core_share)
    except ConfigError as error:
        if Path(engine.core_page) != default_core_page():  # named by a flag
            raise
        sys.stderr.write(f"cores are not lent: {error}\n")
        torch.set_num_threads(min(engine.threads, max(1, len(os.sched_getaffinity(0)) // engine.stages)))
        return contextlib.nullcontext
    kernels = library.get() if runner.model.native else None
    if kernels is not None:
        kernels.lend(cores.address, SLOTS, cores.own)
        turns = StepTurns(kernels.others_compute, kernels.had)
        runner.give_way, runner.cpu_share = turns.give_way, turns.cpu_share
        return cores.computing

    def split() -> AbstractContextManager[None]:
        if not engine.deterministic:
            torch.set_num_threads(min(max(1, engine.threads), cores.fixed_split()))
        return contextlib.nullcontext()

    return split


def serve(channel: BlockingChannel, pool_fd: int) -> None:
    """Load the stage, then run steps until the order to shut down."""
    spec: StageSpec = channel.receive()
    gates = KVGates()
    receiver = OrderReceiver(channel, gates, spec.engine, spec.rendezvous)
    receiver.start()
    begin = time.monotonic()
    import_libraries()

    def sizes() -> EngineSizes:
        order = receiver.next_order(wait=True)
        if not isinstance(order, EngineSizes):  # the start was given up
            _exit(0)
        return order

    runner, footprint = StageLoader(spec, pool_fd, gates, channel, sizes).load()
    receiver.load, receiver.load_lora = runner.load, runner.load_lora
    turn = step_turns(spec.engine, runner)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    model, seconds = runner.model, time.monotonic() - begin
    computing = describe_compute(runner)
    channel.send(WorkerReady(seconds, peak_bytes, footprint, computing, model.changed_weights, model.mapped_bytes))

    def run(step: Step | None) -> bool:
        with turn():
            return runner.go_on() if step is None else runner.run(step)

    goes_on = False
    while True:
        order = receiver.next_order(wait=not goes_on)
        assert not isinstance(order, EngineSizes), "sizes come before all steps"
        if isinstance(order, Shutdown):
            while goes_on:  # the run was given up
                goes_on = run(None)
            runner.close()
            return
        if isinstance(order, FetchBlocks):
            runner.fetch(order)
        elif isinstance(order, DropLora):
            runner.drop_lora(order)
        else:
            goes_on = run(order)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the worker to the end."""
    parser = argparse.ArgumentParser(prog="moonpool.engine.worker")
    parser.add_argument("--channel", type=int, required=True, help="descriptor of the socket to the I/O process")
    parser.add_argument("--pool", type=int, required=True, help="descriptor of this stage's part of the KV pool")
    args = parser.parse_args(argv)
    channel = BlockingChannel(socket.socket(fileno=args.channel))
    try:
        serve(channel, args.pool)
    except Exception as error:
        _end_process(channel, error)
    _exit(0)


def _end_process(channel: BlockingChannel, error: BaseException) -> NoReturn:
    """End the process after an error in any thread."""
    if isinstance(error, ChannelClosed):
        _exit(_ORPHANED)
    if isinstance(error, MoonpoolError):
        _exit(_report(channel, WorkerFailed(error.message, type(error).__name__, getattr(error, "field", ""))))
    traceback.print_exception(error)
    _exit(_report(channel, WorkerFailed(f"{type(error).__name__}: {error}")))


def _exit(code: int) -> NoReturn:
    sys.stderr.flush()
    # Not sys.exit: tearing down torch, gloo and a blocked thread takes long and can hang; the kernel frees everything.
    os._exit(code)


def _report(channel: BlockingChannel, failure: WorkerFailed) -> int:
    try:
        channel.send(failure)
    except ChannelClosed:
        return _ORPHANED
    return _FAILED


if __name__ == "__main__":
    main()
