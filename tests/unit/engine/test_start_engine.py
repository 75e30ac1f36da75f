"""The I/O side against workers without torch: order, gates, death, and nothing left behind."""

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from moonpool.base.errors import ConfigError, DeadlineExceeded, Internal, Unavailable, UnsupportedModel
from moonpool.base.fork_server import Launcher, execute, start_service
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.media import MediaItem
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step, StepResult
from moonpool.engine.interface import Engine
from moonpool.engine.messages import EngineSpec
from moonpool.engine.pool_memory import PoolMemory
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_engine import start_processes
from tests.examples import each

FAKE = "tests.unit.engine.fake_worker"
LAYOUT = KVLayout.uniform(layers=4, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
DIE, HANG, FAIL, WORK = 1, 2, 3, 10
GREEDY = SampleSpec()


def spec(checkpoint: str = "", *, stages: int = 1, step_timeout_s: float = 30.0) -> EngineSpec:
    return EngineSpec(
        checkpoint, "float32", LAYOUT, 2, stages=stages, gate_timeout_s=20, step_timeout_s=step_timeout_s, measure=False
    )


def step(step_id: int, *tokens: int, gated: bool = False, layer_events: bool = False) -> Step:
    sequences = tuple(SequenceStep(array("i", [token]).tobytes(), 0, (0,)) for token in tokens)
    return Step(step_id, sequences, gated, layer_events)


def open_fds() -> set[tuple[str, str]]:
    """Numbers, and what they are: others may be closed meanwhile, and their numbers used again."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((fd.name, os.readlink(fd)))
    return found


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, for this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@asynccontextmanager
async def started(engine_spec: EngineSpec, launcher: Launcher = start_service) -> AsyncIterator[ProcessEngine]:
    """An engine of fake workers, which are forked: that is quicker, and most tests are not about the start."""
    async with start_processes(engine_spec, start_timeout_s=90, worker_module=FAKE, launcher=launcher) as engine:
        assert isinstance(engine, ProcessEngine)
        assert isinstance(engine, Engine)
        yield engine
    for pid in engine.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_steps_run_and_nothing_is_left_afterwards(temporary: Path) -> None:
    fds = open_fds()
    async with started(spec(stages=2), execute) as engine:
        assert is_empty(temporary)
        assert (engine.stages, engine.blocks, engine.layout, len(engine.pool.parts)) == (2, 2, LAYOUT, 2)
        assert {os.getsid(pid) for pid in engine.pids} == {os.getsid(0)}, "cores are shared fairly within a session"
        assert [os.getpgid(pid) for pid in engine.pids] == engine.pids, "Ctrl-C does not reach them"
        layers: list[LayerDone] = []
        result = await engine.run(step(1, WORK, 20, layer_events=True), on_layer=layers.append)
        assert (result.sampled, result.aborted, result.start_ns, result.end_ns) == ((WORK, 20), False, 0, 10)
        assert sorted(layer.layer for layer in layers) == [0, 1, 2, 3]
        assert not engine.failed.done()
    assert engine.failed.result() == "the engine was shut down"
    with pytest.raises(Unavailable, match="shut down"):
        await engine.run(step(2, WORK))
    await engine.shutdown()
    assert open_fds() <= fds


def environment(pid: int) -> set[bytes]:
    return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


async def test_a_stage_that_waits_for_a_lost_one_is_not_aborted_by_torch() -> None:
    """Or the reason would be torch's signal."""
    async with started(spec(stages=2), execute) as engine:
        for pid in engine.pids:
            assert {b"TORCH_NCCL_ASYNC_ERROR_HANDLING=0", b"TORCH_NCCL_ENABLE_MONITORING=0"} <= environment(pid)


async def test_leaving_aborts_what_is_in_flight() -> None:
    async with started(spec()) as engine:
        run = asyncio.ensure_future(engine.run(step(1, WORK, gated=True)))
        await asyncio.sleep(0)
    assert (await run).aborted


def test_the_io_side_needs_neither_torch_nor_grpc() -> None:
    names = ("interface", "start_engine", "worker", "prefill.core.scheduler", "decode.core.scheduler")
    modules = ", ".join(f"moonpool.engine.{name}" for name in names)
    program = f"import sys, {modules}; print({{'torch', 'grpc'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"


async def test_at_most_one_step_more_than_stages_and_ids_grow() -> None:
    async with started(spec(stages=2)) as engine:
        runs = [asyncio.ensure_future(engine.run(step(n, n * 100, gated=True))) for n in (1, 2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(Internal, match="one more than the 3"):
            await engine.run(step(4, 5))
        engine.open_gate(1, 3)
        assert (await runs[0]).sampled == (100,)
        with pytest.raises(Internal, match="step 3 after step 3"):
            await engine.run(step(3, 5))
        engine.open_gate(2, 3)
        engine.open_gate(3, 3)
        assert [(await run).sampled for run in runs[1:]] == [(200,), (300,)]


class Listens:
    """A worker of a stage that does nothing but note what it is told; its own channel, too."""

    rank = pid = 0

    def __init__(self, stage: int) -> None:
        self.stage, self.told = stage, list[Any]()

    @property
    def channel(self) -> "Listens":
        return self

    def send(self, message: object) -> None:
        self.told.append(message)


async def test_files_and_rows_of_pictures_go_to_the_first_stage_alone() -> None:
    """Others need a picture's place and size. What is in a step of pictures may be more than a connection carries."""
    item = MediaItem(2, 6, b"d" * 32, b"file" * 1000, 30, 40, "low")
    whole = replace(step(1, 5).sequences[0], media=(item,), picture_rows={item.digest: b"rows" * 1000})
    workers: list[Any] = [Listens(0), Listens(0), Listens(1), Listens(2)]
    engine = ProcessEngine(spec(stages=3), PoolMemory([]), workers)
    for number, part in enumerate((whole, step(1, 5).sequences[0])):
        run = asyncio.ensure_future(engine.run(Step(number, (part,))))
        await asyncio.sleep(0)
        run.cancel()
        told = [worker.told[number].sequences[0] for worker in workers]
        assert told[0] is told[1] is part
        assert told[2] == told[3] == part
    seen = workers[3].told[0].sequences[0]
    assert (seen.media[0].content, seen.picture_rows) == (b"", {})
    (found,) = seen.media
    assert (found.width, found.height, found.detail) == (30, 40, "low")


async def test_gates_and_aborts_may_come_before_the_step() -> None:
    async with started(spec()) as engine:
        layers: list[LayerDone] = []
        engine.open_gate(1, 1)
        run = asyncio.ensure_future(engine.run(step(1, WORK, gated=True, layer_events=True), on_layer=layers.append))
        await asyncio.sleep(0)
        engine.open_gate(1, 3)
        assert (await run).sampled == (WORK,)
        assert [layer.layer for layer in layers] == [0, 1, 2, 3]
        engine.abort(1)  # too late: ignored
        engine.abort(2)
        result = await engine.run(step(2, WORK, gated=True, layer_events=True), on_layer=layers.append)
        assert (result.aborted, result.sampled, len(layers)) == (True, (), 4)


async def test_each_step_of_a_run_is_told_until_it_ends_or_is_cut() -> None:
    async with started(spec()) as engine, asyncio.timeout(60):
        told: list[StepResult] = []
        share = SequenceStep(array("i", [WORK]).tobytes(), 0, (0,), GREEDY)
        result = await engine.run(Step(1, (share,), steps=3), on_step=told.append)
        assert [reported.sampled for reported in (*told, result)] == [(WORK,)] * 3

        def cut(_: StepResult) -> None:
            engine.stop_run(2)

        assert (await engine.run(Step(2, (share,), steps=1 << 40), on_step=cut)).sampled == (WORK,)
        engine.stop_run(2)  # too late: ignored
        assert (await engine.run(step(3, WORK))).sampled == (WORK,)


async def test_a_cancelled_caller_does_not_stop_the_step() -> None:
    async with started(spec()) as engine:
        run = asyncio.ensure_future(engine.run(step(1, WORK, gated=True)))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        with pytest.raises(Internal, match="one more"):
            await engine.run(step(2, WORK))
        engine.abort(1)
        await engine.idle()
        assert (await engine.run(step(3, WORK))).sampled == (WORK,)


async def test_an_error_of_the_listener_is_the_callers() -> None:
    async with started(spec()) as engine:

        def listener(_: LayerDone) -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await engine.run(step(1, WORK, layer_events=True), on_layer=listener)
        assert (await engine.run(step(2, WORK))).sampled == (WORK,)


REASONS = {signal.SIGKILL: r"was killed by signal 9", signal.SIGSTOP: "is stopped"}
"""A stopped process closes no channel."""
UNDER_WAY = {
    "idle": [],
    "in a step": [step(1, HANG)],
    "at a gate": [step(1, WORK, gated=True), step(2, WORK, gated=True)],
}


@pytest.mark.parametrize(("phase", "number", "stages", "which"), each(UNDER_WAY, REASONS, [1, 2], [0, -1]))
async def test_a_lost_process_fails_the_engine_and_all_its_runs(
    phase: str, number: signal.Signals, stages: int, which: int
) -> None:
    """Whatever is under way, and whichever rank of a stage is lost: the engine names it."""
    rank, stage = (0, 0) if which == 0 else (1, stages - 1)
    reason = rf"^engine stage {stage} rank {rank} \(process \d+\) {REASONS[number]}"
    async with started(replace(spec(stages=stages), ranks=2)) as engine:
        runs = [asyncio.ensure_future(engine.run(order)) for order in UNDER_WAY[phase][:stages]]
        await asyncio.sleep(0)
        os.kill(engine.pids[which], number)
        async with asyncio.timeout(60):
            assert re.match(reason, await asyncio.shield(engine.failed))
            for run in runs:
                with pytest.raises(Unavailable, match=reason):
                    await run
        with pytest.raises(Unavailable, match=reason):
            await engine.run(step(9, WORK))
        engine.open_gate(9, 0)
        engine.abort(9)


@pytest.mark.parametrize("number", REASONS)
async def test_a_process_that_is_lost_while_the_engine_starts(number: signal.Signals) -> None:
    before = _children()

    async def start() -> None:
        mute = replace(spec("mute"), ranks=2)
        async with start_processes(mute, start_timeout_s=90, worker_module=FAKE, launcher=execute):
            pytest.fail("it came up")

    starting = asyncio.ensure_future(start())
    while len(new := _children() - before) < 2:
        assert not starting.done()
        await asyncio.sleep(0)
    os.kill(max(new), number)
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match=rf"rank \d .*{REASONS[number]}"):
            await starting
    assert _children() == before


@pytest.mark.parametrize("number", REASONS)
async def test_a_process_that_is_lost_as_the_engine_ends(number: signal.Signals) -> None:
    """Nothing is left of it."""
    async with started(replace(spec(), ranks=2)) as engine:
        os.kill(engine.pids[1], number)


@pytest.mark.parametrize(
    ("order", "reason"), [(DIE, "stage 1 .* was killed by signal 9"), (FAIL, "engine stage . .* failed: no more")]
)
async def test_a_step_that_kills_its_worker(order: int, reason: str) -> None:
    async with started(spec(stages=2)) as engine:
        with pytest.raises(Unavailable, match=reason):
            await engine.run(step(1, order))


async def test_a_hung_worker_fails_the_engine() -> None:
    async with started(spec(step_timeout_s=0.2)) as engine:
        with pytest.raises(Unavailable, match=r"step 1 was not done after 0\.2 s"):
            await engine.run(step(1, HANG))


async def test_a_step_is_over_when_all_ranks_say_so() -> None:
    """Layers and tokens come once, of each stage's first rank."""
    async with started(replace(spec(stages=2), ranks=3)) as engine:
        assert (engine.stages, len(engine.pids), len(engine.pool.parts)) == (2, 6, 2)
        layers: list[LayerDone] = []
        result = await engine.run(step(1, WORK, 20, layer_events=True), on_layer=layers.append)
        assert (result.sampled, result.aborted) == ((WORK, 20), False)
        assert sorted(layer.layer for layer in layers) == [0, 1, 2, 3]
        engine.abort(2)
        assert (await engine.run(step(2, WORK, gated=True))).aborted


@pytest.mark.parametrize(
    ("checkpoint", "timeout_s", "error", "message"),
    [
        ("dies", 60.0, Unavailable, "ended with exit code 9"),
        ("refuses", 60.0, UnsupportedModel, "rope: not this one"),
        ("mute", 0.5, DeadlineExceeded, r"did not go on for 0\.5 s"),
    ],
)
async def test_an_engine_that_does_not_come_up_leaves_nothing(
    checkpoint: str, timeout_s: float, error: type[Exception], message: str
) -> None:
    fds, children = open_fds(), _children()
    with pytest.raises(error, match=message):
        async with start_processes(
            spec(checkpoint, stages=2), start_timeout_s=timeout_s, worker_module=FAKE, launcher=execute
        ):
            pytest.fail("it came up")
    assert open_fds() <= fds
    assert _children() == children


async def test_impossible_specs_are_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        async with start_processes(spec(stages=5), start_timeout_s=1, worker_module=FAKE, launcher=execute):
            pass


def test_workers_die_with_a_killed_io_process() -> None:
    program = f"""
import asyncio
import contextlib
from moonpool.engine.start_engine import start_processes
from tests.examples import each
from moonpool.base.fork_server import execute
from tests.unit.engine.test_start_engine import FAKE, spec, step
async def main():
    async with start_processes(spec(stages=2), start_timeout_s=60, worker_module=FAKE, launcher=execute) as engine:
        print(*engine.pids, flush=True)
        await engine.run(step(1, {HANG}))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        gone = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    assert len(gone) == 2
    for fd in gone:
        assert select.select([fd], [], [], 60)[0], "a worker outlived its parent"
        os.close(fd)


def test_the_engine_runs_on_uvloop() -> None:
    async def main() -> None:
        async with started(spec(stages=2)) as engine:
            assert (await engine.run(step(1, WORK))).sampled == (WORK,)
            os.kill(engine.pids[0], signal.SIGKILL)
            async with asyncio.timeout(60):
                assert "was killed by signal 9" in await asyncio.shield(engine.failed)

    uvloop.run(main())


def _children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
