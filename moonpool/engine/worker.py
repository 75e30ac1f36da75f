"""An engine process: `python -P -m moonpool.engine.worker --channel FD --pool FD`, started by the I/O process only.

A stage with several ranks has one process for each (`--page FD`).

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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.families.spec import described_ways
from moonpool.base.scheduling.steps import Step, max_steps_in_flight
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
    HiddenStates,
    LoadKV,
    LoadLora,
    OpenKVGateMessage,
    Shutdown,
    StageSpec,
    StopRunMessage,
    WorkerFailed,
    WorkerReady,
)
from moonpool.engine.stage_loader import StageLoader

if TYPE_CHECKING:
    from moonpool.engine.model_runner import StageRunner


_ORPHANED = 70  # exit code when the channel closed under us
_FAILED = 1


class OrderReceiver:
    """Reads the channel in a separate thread, so that gates, aborts and the parent's death are noticed at any time."""

    def __init__(self, channel: BlockingChannel, gates: KVGates, spec: StageSpec) -> None:
        # The parent never has more steps in flight, so many fetches, and one order for each adapter; one more place is
        # for Shutdown.
        places = max_steps_in_flight(spec.engine.stages) + MAX_FETCHES + spec.engine.max_loras + 1
        self.orders: queue.Queue[Step | FetchBlocks | DropLora | Shutdown | EngineSizes] = queue.Queue(places)
        self.hidden_states: queue.Queue[HiddenStates] = queue.Queue()
        """Of the stage before, if they come through the I/O process; at most as many as there are steps."""
        self._channel = channel
        self._gates = gates
        self._meetings = filter(None, (spec.rendezvous, os.path.dirname(spec.rank_store)))
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
                elif isinstance(message, HiddenStates):
                    self.hidden_states.put(message)
                elif isinstance(message, LoadKV):
                    self.load(message)
                elif isinstance(message, LoadLora):
                    # Files take long to read, and this thread must hear of gates and aborts meanwhile.
                    threading.Thread(target=self.load_lora, args=(message,), name="lora", daemon=True).start()
                else:
                    self.orders.put_nowait(message)
        except ChannelClosed:
            # The I/O process has ended. The computing thread may be blocked in a collective: exit at once.
            for folder in self._meetings:
                shutil.rmtree(folder, ignore_errors=True)
        except BaseException:
            traceback.print_exc()
        os._exit(_ORPHANED)


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
    from moonpool.engine.kernels.choice import REPLACED

    model, graphs = runner.model, "" if runner.graphs is None else "; decode steps as graphs"
    graphs += "" if runner.prompt_graphs is None else "; prompts as graphs of layers"
    layers = described_ways(model.not_native, model.layer_begin)
    wrong = f" (but {', '.join(sorted(REPLACED))}: torch, as Triton is wrong here)" if REPLACED else ""
    return f"{model.kernels}{wrong}, {layers}{graphs}"


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
        torch.set_num_threads(
            min(engine.threads, max(1, len(os.sched_getaffinity(0)) // (engine.stages * engine.ranks)))
        )
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


def serve(channel: BlockingChannel, pool_fd: int, page_fd: int) -> None:
    """Load the stage, then run steps until the order to shut down."""
    spec: StageSpec = channel.receive()
    gates = KVGates()
    receiver = OrderReceiver(channel, gates, spec)
    receiver.start()
    begin = time.monotonic()
    import_libraries()

    def sizes() -> EngineSizes:
        order = receiver.next_order(wait=True)
        if not isinstance(order, EngineSizes):  # the start was given up
            _exit(0)
        return order

    runner, footprint = StageLoader(
        spec, pool_fd, page_fd, gates, channel, receiver.hidden_states, sizes, partial(_end_process, channel)
    ).load()
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
        order = receiver.next_order(wait=not goes_on)  # a run's next step needs no order
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
    parser.add_argument("--page", type=int, default=-1, help="descriptor of the page of this stage's ranks")
    args = parser.parse_args(argv)
    channel = BlockingChannel(socket.socket(fileno=args.channel))
    try:
        serve(channel, args.pool, args.page)
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
