"""Joining a leader, being refused, loss and return, with processes that compute nothing."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from moonpool.base.checkpoint import weights_fingerprint
from moonpool.base.config import parse_address
from moonpool.base.errors import ConfigError, Internal, Unavailable
from moonpool.base.fork_server import Program
from moonpool.base.kv.keys import slice_hash
from moonpool.base.rpc.roles import RoleGate, fingerprint
from moonpool.base.rpc.tls import NAME, Security
from moonpool.base.scheduling.steps import LayerDone
from moonpool.engine.messages import (
    EngineSpec,
    FetchBlocks,
    Footprint,
    HiddenStates,
    Shutdown,
    StageDone,
    StageSpec,
    StageStarting,
    WorkerReady,
)
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.remote.link import StageLink
from moonpool.engine.remote.listener import StagesListener
from moonpool.engine.remote.messages import KVSlice
from moonpool.engine.remote.remote_worker import RemoteWorker
from moonpool.engine.remote.stage_host import StagePlace, StageProcesses, join, serve_leader
from moonpool.engine.start_listener import NO_LISTENER
from moonpool.engine.worker_process import Worker
from tests.unit.base.rpc.certificates import tls
from tests.unit.engine.remote.hosts import host, leading, security, stages_listener
from tests.unit.engine.test_start_engine import FAKE, HANG, LAYOUT, WORK, open_fds, step

WAIT_S = 60


def spec(checkpoint: Path, stages: int = 2) -> EngineSpec:
    return EngineSpec(
        str(checkpoint), "float32", LAYOUT, 2, stages=stages, gate_timeout_s=20, step_timeout_s=WAIT_S, measure=False
    )


def place(leader: str, checkpoint: Path, node_rank: int = 1) -> StagePlace:
    return StagePlace(leader, node_rank, checkpoint, weights_fingerprint(checkpoint))


@pytest.mark.parametrize("ranks", [1, 2])
async def test_steps_run_and_nothing_is_left_afterwards(checkpoint: Path, ranks: int) -> None:
    fds, before = memory(), children()
    asked = replace(spec(checkpoint, 3), ranks=ranks)
    async with (
        stages_listener(count=2) as listener,
        host(listener.address, checkpoint, node_rank=2, worker_module=FAKE),
        host(listener.address, checkpoint, node_rank=1, worker_module=FAKE) as second,
        leading(asked, listener, worker_module=FAKE) as engine,
        asyncio.timeout(WAIT_S),
    ):
        assert (engine.stages, len(engine.pids), len(engine.pool.parts)) == (3, ranks, 3)
        layers: list[LayerDone] = []
        result = await engine.run(step(1, WORK, 20, layer_events=True), on_layer=layers.append)
        assert (result.sampled, result.aborted) == ((WORK, 20), False)
        assert sorted(layer.layer for layer in layers) == [0, 1, 2, 3]
        gated = asyncio.ensure_future(engine.run(step(2, WORK, gated=True)))
        await asyncio.sleep(0)
        engine.open_gate(2, 3)
        assert (await gated).sampled == (WORK,)
        engine.abort(3)
        assert (await engine.run(step(3, WORK, gated=True))).aborted
        assert await second.changes.get()
    assert memory() == fds
    assert len(children() - before) <= 1, "the fork server is another test's, too"


def memory() -> set[tuple[str, str]]:
    """Descriptors of pools."""
    return {fd for fd in open_fds() if "moonpool-kv" in fd[1]}


async def test_a_lost_stage_fails_the_engine_and_the_next_engine_has_all_stages_again(checkpoint: Path) -> None:
    """The stage's process is killed; then the leader begins anew, at the same address."""
    async with stages_listener() as listener:
        address = listener.address
        async with host(address, checkpoint, worker_module=FAKE) as stage, asyncio.timeout(WAIT_S):
            async with leading(spec(checkpoint), listener, worker_module=FAKE) as engine:
                run = asyncio.ensure_future(engine.run(step(1, 1)))  # kills the last stage's process
                with pytest.raises(Unavailable, match=r"stage 1 at .* failed: .* was killed by signal 9"):
                    await run
                assert engine.failed.done()
            assert [await stage.changes.get() for _ in range(2)] == [True, False]
            await listener.__aexit__()
            async with (
                stages_listener(address) as again,
                leading(spec(checkpoint), again, worker_module=FAKE) as engine,
            ):
                assert (await engine.run(step(1, WORK))).sampled == (WORK,)


async def test_a_lost_host_is_noticed_and_another_one_takes_its_place(checkpoint: Path) -> None:
    async with stages_listener() as listener, asyncio.timeout(WAIT_S):
        async with (
            host(listener.address, checkpoint, worker_module=FAKE) as stage,
            leading(spec(checkpoint), listener, worker_module=FAKE) as engine,
        ):
            run = asyncio.ensure_future(engine.run(step(1, HANG)))
            await asyncio.sleep(0)
            await stage.close()
            with pytest.raises(Unavailable, match=r"stage 1 at .*: closed the connection"):
                await run
        address = listener.address
    async with (
        stages_listener(address) as listener,
        host(address, checkpoint, worker_module=FAKE),
        leading(spec(checkpoint), listener, worker_module=FAKE) as engine,
        asyncio.timeout(WAIT_S),
    ):
        assert (await engine.run(step(1, WORK))).sampled == (WORK,)


async def test_a_stopped_process_of_a_stage_is_lost(checkpoint: Path) -> None:
    async with (
        stages_listener() as listener,
        host(listener.address, checkpoint, worker_module=FAKE),
        asyncio.timeout(WAIT_S),
    ):
        before = children()
        async with leading(spec(checkpoint), listener, worker_module=FAKE) as engine:
            (pid,) = children() - before - set(engine.pids)
            os.kill(pid, signal.SIGSTOP)
            assert "is stopped" in await asyncio.shield(engine.failed)


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@asynccontextmanager
async def joined_by_hand(
    checkpoint: Path, silence_s: float = 30.0
) -> AsyncIterator[tuple[ProcessEngine, StageLink, StageSpec]]:
    """An engine whose second stage is the test itself."""
    async with stages_listener(silence_s=silence_s) as listener, asyncio.timeout(WAIT_S):

        async def be_a_stage() -> tuple[StageLink, StageSpec, asyncio.Task[Any]]:
            while True:
                with contextlib.suppress(Unavailable):
                    link, number = await join(place(listener.address, checkpoint), None, silence_s=30)
                    assert number == 1
                    work = await link.receive()
                    link.send(WorkerReady(0.0, 0, Footprint(4, 3, 2, 1, 0), "nothing"))
                    return link, work, asyncio.create_task(link.receive())
                await asyncio.sleep(0.05)

        stage = asyncio.create_task(be_a_stage())
        async with leading(spec(checkpoint), listener, worker_module=FAKE) as engine:
            link, work, answering = await stage
            answering.cancel()  # it has answered pings while the leader's own stage started
            await asyncio.wait([answering])
            yield engine, link, work
            link.close("over")


async def test_a_silent_stage_is_lost(checkpoint: Path) -> None:
    async with joined_by_hand(checkpoint, silence_s=0.4) as (engine, _, _):
        assert (await asyncio.shield(engine.failed)).endswith("was not heard for 0.4 s")


def slice_of(layer: int, block: int, *, nbytes: int = LAYOUT.slice_bytes(0), value: int | None = None) -> KVSlice:
    data = bytes(nbytes)
    return KVSlice(layer, block, slice_hash(data) if value is None else value, True, data)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (slice_of(0, 0), "sent KV of layer 0 and block 0, which it does not have"),
        (slice_of(2, 7), "sent KV of layer 2 and block 7, which it does not have"),
        (slice_of(2, 0, nbytes=8), "sent damaged KV of layer 2"),
        (slice_of(2, 0, value=5), "sent damaged KV of layer 2"),
        (LayerDone(1, 0, 0, 1), "reported layer 0, which it does not have"),
        (StageDone(1, 0, (), False, 0, 1), "reported step 1 of stage 0"),
        (StageDone(-9, 1, (), False, 0, 1), "reported step -9 of stage 1, after step -9"),
    ],
)
async def test_a_stage_that_reports_what_is_not_its_own_is_dropped_by_name(
    checkpoint: Path, message: KVSlice | LayerDone | StageDone, why: str
) -> None:
    async with joined_by_hand(checkpoint) as (engine, link, _):
        for _ in range(2):
            link.send(message)
        assert why in await asyncio.shield(engine.failed)


async def test_kv_of_a_stage_comes_before_its_report(checkpoint: Path) -> None:
    async with joined_by_hand(checkpoint) as (engine, link, work):
        assert (work.layer_begin, work.layer_end, work.rendezvous) == (2, 4, "")
        layers: list[bytes] = []
        run = asyncio.ensure_future(
            engine.run(
                step(1, WORK, layer_events=True),
                on_layer=lambda done: layers.append(bytes(engine.pool.slice(done.layer, 1))),
            )
        )
        order = await link.receive()
        assert order.step_id == 1
        data = b"\7" * LAYOUT.slice_bytes(2)
        for layer in (2, 3):
            link.send(KVSlice(layer, 1, slice_hash(data), True, data))
            link.send(LayerDone(1, layer, 0, 1))
        link.send(StageDone(1, 1, (5,), False, 0, 1))
        assert (await run).sampled == (5,)
        assert layers.count(data) == 2
        assert engine.pool.read(2, 1)[1] == slice_hash(data)


async def test_what_lands_goes_to_the_stage_before_the_order_that_needs_it(checkpoint: Path) -> None:
    async with joined_by_hand(checkpoint) as (engine, link, _):
        data = b"\7" * LAYOUT.slice_bytes(2)
        engine.pool.write(2, 0, memoryview(data), slice_hash(data))
        engine.pool.write(1, 0, memoryview(data), slice_hash(data))  # of the leader's own stage
        run = asyncio.ensure_future(engine.run(step(1, WORK)))
        got = [await link.receive() for _ in range(2)]
        assert got[0] == KVSlice(2, 0, slice_hash(data), True, data)
        assert got[1].step_id == 1
        loaded = engine.load()
        assert loaded is not None
        link.close("over")
        with pytest.raises(Unavailable, match="closed the connection"):
            await loaded
        with pytest.raises(Unavailable, match="closed the connection"):
            await run


async def test_swapped_in_kv_of_a_part_filled_block_goes_to_the_stage(checkpoint: Path) -> None:
    """Its hash in the pool is what the block had before."""
    async with joined_by_hand(checkpoint) as (engine, link, _):
        data = b"\7" * LAYOUT.slice_bytes(2)
        engine.pool.write(2, 0, memoryview(data), 5)
        loaded = engine.load()
        assert loaded is not None
        assert await link.receive() == KVSlice(2, 0, slice_hash(data), True, data)
        link.close("over")
        with pytest.raises(Unavailable, match="closed the connection"):
            await loaded


async def test_what_lands_goes_to_the_stage_before_blocks_are_fetched_from_there(checkpoint: Path) -> None:
    """Else the stage would give back what an earlier sequence had in the block."""
    async with joined_by_hand(checkpoint) as (engine, link, _):
        data = b"\7" * LAYOUT.slice_bytes(2)
        engine.pool.write(2, 0, memoryview(data), slice_hash(data))
        fetched = asyncio.ensure_future(engine.fetch((0,)))
        got = [await link.receive() for _ in range(2)]
        assert got == [KVSlice(2, 0, slice_hash(data), True, data), FetchBlocks(got[1].number, (0,))]
        link.close("over")
        with pytest.raises(Unavailable, match="closed the connection"):
            await fetched


@asynccontextmanager
async def waiting(checkpoint: Path, listener: StagesListener) -> AsyncIterator["asyncio.Task[Sequence[Worker]]"]:
    """A leader that waits for a stage; the stages once they have joined."""
    async with listener:
        told = asyncio.Event()

        class Told:
            def starting(self, what: str) -> None:
                assert "node ranks [1]" in what
                told.set()

            loading = NO_LISTENER.loading

        asked = replace(spec(checkpoint), weights=weights_fingerprint(checkpoint))
        task = asyncio.create_task(listener.joined(asked, Told()))
        await told.wait()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


HOSTILE: list[tuple[bytes, str]] = [
    (b"GET / HTTP/1.1\r\n\r\n", "sent a message of 542393671 bytes, of 4096 at most"),
    (b"\x16\x03\x01\x02\x00\x01\x00", "speaks TLS, which this end does not"),
    (b"\xff" * 64, "sent a message of 4294967295 bytes"),
    (len(pickle.dumps(Shutdown())).to_bytes(4, "little") + pickle.dumps(Shutdown()), "unknown kind 128"),
    (b"\2\0\0\0\0\1", "StageHello: "),
    (b"\1\0", "closed the connection"),
    (b"", "closed the connection"),
]


@pytest.mark.parametrize(("data", "why"), HOSTILE, ids=["http", "tls", "ones", "pickle", "cut", "half", "nothing"])
async def test_a_hostile_peer_is_refused_by_name(
    checkpoint: Path, data: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = stages_listener()
    async with waiting(checkpoint, listener), asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(*parse_address(listener.address))
        writer.write(data)
        writer.write_eof()
        await reader.read()  # until the leader closes
        writer.close()
        link, _ = await join(place(listener.address, checkpoint), None)
        link.close("over")
    assert "refused what is no stage of this engine" in caplog.text
    assert why in caplog.text


async def test_a_peer_that_is_gone_before_it_is_looked_at_is_refused_like_others(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = stages_listener()
    async with waiting(checkpoint, listener), asyncio.timeout(WAIT_S):
        with socket.create_connection(parse_address(listener.address)) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        link, _ = await join(place(listener.address, checkpoint), None)
        link.close("over")
    assert "refused what is no stage of this engine" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_what_a_stage_says_before_it_is_asked_fills_no_memory(checkpoint: Path) -> None:
    listener, count, size = stages_listener(), 400, 20_000
    async with waiting(checkpoint, listener) as leader, asyncio.timeout(WAIT_S):
        link, _ = await join(place(listener.address, checkpoint), None)
        (worker,) = await leader
        assert isinstance(worker, RemoteWorker)
        for number in range(count):
            link.send(StageStarting(f"{number} ".ljust(size)))
        for turn in range(1_000):  # by far enough for all, if the leader would take all
            await asyncio.sleep(0)
            assert worker.link.received_bytes < 260 * size, turn
        for number in range(count):
            assert (await worker.receive()).what.startswith(f"{number} ")
        link.close("over")


async def test_all_addresses_of_the_leaders_name_are_tried(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have an address of IPv6 at which nobody listens."""
    listener = stages_listener()
    async with waiting(checkpoint, listener), asyncio.timeout(WAIT_S):
        _, port = parse_address(listener.address)

        async def resolve(host: str, asked: int, **_: object) -> list[tuple[object, ...]]:
            assert (host, asked) == ("leader.test", port)
            tcp = socket.SOCK_STREAM, 0, ""
            return [(socket.AF_INET6, *tcp, ("::1", port, 0, 0)), (socket.AF_INET, *tcp, ("127.0.0.1", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        link, _ = await join(place(f"leader.test:{port}", checkpoint), None)
        link.close("over")
    with pytest.raises(Unavailable, match=f"no leader at leader.test:{port}: .*127.0.0.1"):
        await join(place(f"leader.test:{port}", checkpoint), None)


async def test_nothing_of_a_lost_stage_is_left_once_another_has_joined(checkpoint: Path) -> None:
    listener = stages_listener()
    async with waiting(checkpoint, listener), asyncio.timeout(WAIT_S):
        link, _ = await join(place(listener.address, checkpoint), None)
        tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith("engine stage 1 at")]
        assert len(tasks) == 2
        link.close("over")
        while link.reason == "over":
            with contextlib.suppress(Unavailable):
                link, _ = await join(place(listener.address, checkpoint), None)
        await asyncio.wait(tasks)
        link.close("over")


async def test_a_host_that_cannot_start_its_stage_says_why(checkpoint: Path) -> None:
    def no_room(program: Program) -> NoReturn:
        raise OSError(12, "no room for a process")

    async def be_a_host(address: str) -> str:
        while True:
            with contextlib.suppress(Unavailable):
                link, _ = await join(place(address, checkpoint), None)
                return await serve_leader(place(address, checkpoint), link, StageProcesses(launcher=no_room))
            await asyncio.sleep(0.05)

    async with stages_listener() as listener, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(be_a_host(listener.address))
        with pytest.raises(Internal, match=r"stage 1 at .* failed: .*no room for a process"):
            async with leading(spec(checkpoint), listener, worker_module=FAKE):
                pass
        assert "no room for a process" in await running


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda place: replace(place, node_rank=2), "node_rank: must be from 1 to 1, not 2"),
        (lambda place: replace(place, weights=b"\1" * 32), r"model: the stage has other weights \(01010101\)"),
    ],
)
async def test_a_stage_that_does_not_fit_is_told_why(
    checkpoint: Path, change: Callable[[StagePlace], StagePlace], why: str
) -> None:
    listener = stages_listener()
    async with waiting(checkpoint, listener), asyncio.timeout(WAIT_S):
        with pytest.raises(Unavailable, match=f"refuses this stage: {why}"):
            await join(change(place(listener.address, checkpoint)), None)
        link, _ = await join(place(listener.address, checkpoint), None)
        with pytest.raises(Unavailable, match="node_rank: 1 has joined already"):
            await join(place(listener.address, checkpoint), None)
        link.close("over")


def revoked(folder: Path) -> Security:
    """A leader that does not accept the certificate of `decode` any more."""
    file = folder / "revoked"
    file.write_text(f"sha256:{fingerprint((folder / 'decode.pem').read_bytes())}\n")
    return Security(tls(folder, "prefill"), RoleGate(file))


@pytest.mark.parametrize(
    ("leader", "stage", "why"),
    [
        (security, lambda folder: None, "no leader at"),
        (lambda folder: None, security, "no leader at"),
        (security, lambda folder: security(folder, "client"), "a certificate of role client is no engine's"),
        (security, lambda folder: security(folder / "other"), "no leader at"),
        (revoked, lambda folder: security(folder, "decode"), "this certificate is revoked"),
        (lambda folder: security(folder, "kvstore"), security, "a certificate of role kvstore is no engine's"),
    ],
    ids=["plain stage", "plain leader", "client", "other authority", "revoked", "leader of another role"],
)
async def test_only_engines_of_the_authority_meet(
    checkpoint: Path, tmp_path: Path, leader: Any, stage: Any, why: str
) -> None:
    (tmp_path / "other").mkdir()
    theirs = stage(tmp_path)
    listener = stages_listener(security=leader(tmp_path))
    async with waiting(checkpoint, listener), asyncio.timeout(WAIT_S):
        with pytest.raises(Unavailable, match=why):
            await join(place(listener.address, checkpoint), theirs)


async def test_a_refused_peer_that_stays_is_closed_with_tls_too(checkpoint: Path, tmp_path: Path) -> None:
    """It takes no place of those who join."""
    listener = stages_listener(security=security(tmp_path))
    async with waiting(checkpoint, listener), asyncio.timeout(WAIT_S):
        tls = security(tmp_path, "client").tls.socket_context(server=False)
        host, port = parse_address(listener.address)
        reader, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=NAME)
        assert b"a certificate of role client" in await reader.read()  # to its end: the leader closes
        writer.close()


async def test_too_few_stages_and_a_wrong_address_are_named(checkpoint: Path) -> None:
    async with stages_listener(count=2) as listener:
        with pytest.raises(ConfigError, match="nnodes: 3 hosts need as many stages at least, not 2"):
            await listener.joined(spec(checkpoint), NO_LISTENER)
    with pytest.raises(ConfigError, match="stages_listen: cannot listen at"):
        await stages_listener("192.0.2.1:1").__aenter__()


async def test_hidden_states_go_to_the_next_stage(checkpoint: Path) -> None:
    """Through the leader's process, and from a stage of the leader's host to one of another."""
    async with joined_by_hand(checkpoint) as (engine, link, _):
        run = asyncio.ensure_future(engine.run(step(1, WORK)))
        await link.receive()
        link.send(HiddenStates(1, -1, b""))  # of the last stage: there is no next one
        link.send(StageDone(1, 1, (5,), False, 0, 1))
        assert (await run).sampled == (5,)
