"""An engine instance's life around its service: planned, joined, drained, or dead with its engine."""

import asyncio
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.gguf_files import write_gguf
from moonpool.base.errors import ConfigError, Unavailable, UnsupportedModel
from moonpool.base.errors import Mismatch as MismatchError
from moonpool.base.kv.delete_kv import DeletionLog
from moonpool.base.rpc.channels import Channels, probe
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import serving
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.telemetry.metrics import Metric, MetricSet
from moonpool.base.telemetry.spans import Recorder
from moonpool.engine import setup
from moonpool.engine.config import EngineConfig
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.emulated import profile as profile_module
from moonpool.engine.emulated.profile import load_profile
from moonpool.engine.instance import EngineRole, Handover, InstanceContext, run_instance
from moonpool.engine.loras import InstanceLoras
from moonpool.engine.messages import EngineSpec
from moonpool.engine.role_engine import RoleEngine
from moonpool.engine.roles.process import DecodeProcessConfig, PrefillProcessConfig
from moonpool.engine.setup import engine_setup
from moonpool.engine.start_listener import StartListener
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.unit.base.checkpoint.folder import write_config, write_weights
from tests.unit.engine.models.gguf_files import make_folder
from tests.unit.fakes.conductor import FakeConductor
from tests.unit.fakes.engine import FakeEngine

WAIT_S = 60.0
SPEEDS = Speeds(prefill_base_s=7.0)
PREFILL, DECODE = kv_pb2.INSTANCE_KIND_PREFILL, kv_pb2.INSTANCE_KIND_DECODE


class AnyConfig(EngineConfig):
    """Settings of an instance that does nothing."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "small-model"
    folder.mkdir()
    write_config(folder)
    write_weights(folder / "model.safetensors", {"x": ("F32", [1], b"1234")})
    return folder


def config(folder: Path, **settings: Any) -> AnyConfig:
    return AnyConfig(**{"conductor": "127.0.0.1:1", "model": str(folder), "id": "x-0", "block_size": 16, **settings})


def test_plan(folder: Path) -> None:
    plan = engine_setup(config(folder, kv_cache_memory_bytes=10 << 16, dtype="float32"), stages=2)
    assert plan.layout.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert plan.spec.blocks == (10 << 16) // plan.layout.block_bytes
    assert (plan.spec.stages, plan.spec.dtype, plan.max_tokens, plan.vocab_size) == (2, "float32", 4096, 300)
    assert plan.model.name == "small-model"
    assert len(plan.namespace) == len(plan.model.config_hash) == 32
    assert engine_setup(config(folder)).namespace != plan.namespace  # another dtype, other KV
    assert engine_setup(config(folder, blocks=7, max_model_len=99)).spec.blocks == 7
    assert engine_setup(config(folder, max_model_len=99)).max_tokens == 99
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        engine_setup(config(folder, kv_cache_memory_bytes=100))
    assert (plan.spec.graph_rows, plan.spec.graph_prompts) == (0, True)
    plain: dict[str, Any] = {"conductor": "127.0.0.1:1", "model": str(folder), "max_num_seqs": 7}
    specs = [engine_setup(DecodeConfig(**plain, cuda_graphs=how), decode=True).spec for how in ("auto", "off")]
    assert [(spec.graph_rows, spec.graph_prompts) for spec in specs] == [(7, False), (0, False)]
    assert not engine_setup(config(folder, cuda_graphs="off")).spec.graph_prompts
    assert engine_setup(DecodeConfig(**plain, computes_prompts=True), decode=True).spec.graph_prompts
    wanted_by = {
        (how, stages, decode): engine_setup(config(folder, int8_head=how), stages=stages, decode=decode).spec.int8_head
        for how, stages, decode in (("auto", 1, True), ("off", 1, True), ("auto", 2, True), ("auto", 1, False))
    }
    assert [key for key, wanted in wanted_by.items() if wanted] == [("auto", 1, True)]
    with pytest.raises(ConfigError, match="names 2 devices for 1 pipeline stages"):
        engine_setup(config(folder, device="cuda:0,cuda:0", core_share=0))


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "3 ranks cannot divide layer 0"),
        ({"device": "staged:1,staged:2,staged:3"}, "device", "names 3 devices for 1 pipeline stages with 2 ranks each"),
        ({"engine": "emulated:llama-70b-a800"}, "tensor_parallel_size", "emulated compute has no ranks"),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(
    folder: Path, settings: dict[str, Any], field: str, message: str
) -> None:
    plan = engine_setup(config(folder, tensor_parallel_size=2)).spec
    assert (plan.ranks, plan.core_page, plan.int8_head) == (2, "", False)
    with pytest.raises((ConfigError, UnsupportedModel), match=message) as wrong:
        engine_setup(config(folder, **{"tensor_parallel_size": 2, **settings}))
    assert getattr(wrong.value, "field", None) == field


def test_max_model_len_chooses_the_factors_of_longrope(folder: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
    write_config(folder, original_max_position_embeddings=64, rope_scaling=scaling)
    plans = [engine_setup(config(folder, max_model_len=tokens)) for tokens in (0, 64, 65, 9999)]
    assert [plan.max_tokens for plan in plans] == [64, 64, 65, 4096]
    namespaces = [plan.namespace for plan in plans]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]  # KV of other factors is other KV


def test_a_calibration_of_this_model_is_told_in_place_of_what_is_timed_at_start(folder: Path, tmp_path: Path) -> None:
    bundled = Path(profile_module.__file__).parent / "profiles" / "tiny-cpu-2-cores.yaml"
    profile = tmp_path / "profile.yaml"
    layout = engine_setup(config(folder)).layout
    profile.write_text(bundled.read_text().replace("2560", str(layout.token_bytes)))
    assert engine_setup(config(folder)).spec.speeds is None
    assert engine_setup(config(folder, profile=str(profile))).spec.speeds == load_profile(str(profile)).speeds
    with pytest.raises(ConfigError, match="2560 bytes of KV per token") as wrong:
        engine_setup(config(folder, profile="tiny-cpu-2-cores"))
    assert wrong.value.field == "profile"
    quantised = config(folder, kv_cache_dtype="fp8", profile=str(profile))
    size = engine_setup(config(folder, kv_cache_dtype="fp8")).layout.token_bytes
    model = f"kv_bytes_per_token: {size}\n  kv_dtype: "
    for dtype in ("int8", "float8_e4m3fn"):
        profile.write_text(bundled.read_text().replace("kv_bytes_per_token: 2560", model + dtype))
        if dtype == "int8":
            with pytest.raises(ConfigError, match="KV in int8, this instance has it in float8_e4m3fn") as wrong:
                engine_setup(quantised)
            assert wrong.value.field == "profile"
    assert engine_setup(quantised).spec.speeds is not None
    with pytest.raises(ConfigError, match="leave it out"):
        engine_setup(config(folder, engine="emulated:llama-70b-a800", profile=str(profile)))


def test_other_weights_are_another_namespace(folder: Path) -> None:
    before = engine_setup(config(folder)).namespace
    write_weights(folder / "model.safetensors", {"x": ("F32", [1], b"1235")})
    assert engine_setup(config(folder)).namespace != before


def test_weights_that_are_packed_in_another_way_are_another_namespace(folder: Path) -> None:
    plans = {how: engine_setup(config(folder, quantization=how)) for how in ("auto", "none", "file", "int8", "int4")}
    assert [plan.spec.quantization for plan in plans.values()] == ["none", "none", "none", "int8", "int4"]
    assert plans["auto"].namespace == plans["none"].namespace == plans["file"].namespace
    assert len({plan.namespace for plan in plans.values()}) == 3
    quantised = {engine_setup(config(folder, quantization=how, kv_cache_dtype="int8")).namespace for how in plans}
    assert len(quantised | {plan.namespace for plan in plans.values()}) == 6
    with pytest.raises(ConfigError, match="emulated compute has no weights") as wrong:
        engine_setup(config(folder, engine="emulated:llama-70b-a800", quantization="int8"))
    assert wrong.value.field == "quantization"


def test_codes_of_a_file_are_kept_on_a_cpu(tmp_path: Path) -> None:
    file = write_gguf("llama", make_folder("llama", tmp_path / "folder"), tmp_path / "model.gguf", "Q4_0")
    plans = {how: engine_setup(config(file, quantization=how)) for how in ("auto", "none", "file", "int8", "int4")}
    assert [plan.spec.quantization for plan in plans.values()] == list(plans)
    assert len({plan.namespace for plan in plans.values()}) == 4
    assert plans["auto"].namespace == plans["file"].namespace  # the same numbers
    gpu = engine_setup(config(file, device="cuda"))
    assert gpu.spec.quantization == "none"
    assert gpu.namespace == plans["none"].namespace


def test_an_importance_matrix_is_for_int4_and_makes_other_weights(folder: Path, tmp_path: Path) -> None:
    found = []
    for content in (b"one", b"other"):
        (tmp_path / "imatrix").write_bytes(content)
        found.append(engine_setup(config(folder, quantization="int4", imatrix=str(tmp_path / "imatrix"))))
    assert found[0].spec.imatrix == str(tmp_path / "imatrix")
    plain = engine_setup(config(folder, quantization="int4"))
    assert len({plain.namespace, *(plan.namespace for plan in found)}) == 3
    for wrong, why in (
        ({"quantization": "int8", "imatrix": str(tmp_path / "imatrix")}, "only for quantization=int4, not int8"),
        ({"quantization": "int4", "imatrix": str(tmp_path / "none")}, "there is no file"),
    ):
        with pytest.raises(ConfigError, match=why) as refused:
            engine_setup(config(folder, **wrong))
        assert refused.value.field == "imatrix"


def test_weights_are_mapped_from_a_file_where_an_engine_does_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf("llama", make_folder("llama", tmp_path / "folder"), tmp_path / "model.gguf", "Q4_0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where = tmp_path / "moonpool" / "weights"
    for free, auto in ((300 << 20, True), (1 << 40, False), (None, False)):  # the program and 256 MiB of KV are more
        monkeypatch.setattr(setup, "available_bytes", lambda nbytes=free: nbytes)
        found = {how: engine_setup(config(file, mmap_weights=how)) for how in ("auto", "on", "off")}
        files = {how: plan.spec.weights_file for how, plan in found.items()}
        assert files["off"] == ""
        assert Path(files["on"]).parent == where
        assert files["auto"] == (files["on"] if auto else "")
        assert len({plan.namespace for plan in found.values()}) == 1
    assert engine_setup(config(file, device="staged", mmap_weights="on")).spec.weights_file == ""


class Idle:
    """A service without requests."""

    def __init__(self, shared: InstanceContext) -> None:
        self.shared = shared
        self.handed_over = False
        self.manager = BlockManager(shared.engine.blocks)
        self.draining = False
        self.finish = asyncio.Event()
        self.ran = False

    async def run(self) -> None:
        self.ran = True
        await asyncio.Event().wait()

    def load(self) -> conductor_pb2.LoadReport:
        return conductor_pb2.LoadReport(draining=self.draining)

    def gauges(self) -> MetricSet:
        return MetricSet().add([Metric("draining", "1 while draining.", lambda _: self.draining)], None)

    def replicate(self, order: conductor_pb2.ReplicateOrder) -> None:
        raise AssertionError("nobody orders a copy")

    def drain(self) -> None:
        self.draining = True

    async def drained(self) -> None:
        await self.finish.wait()

    def hand_over(self) -> Handover:
        self.handed_over = True
        loras = InstanceLoras(self.shared.engine, 0, set)
        return Handover(self.manager, DeletionLog(self.shared.setup.namespace, time.monotonic), loras, SPEEDS)


class Life:
    """A running instance."""

    def __init__(self) -> None:
        self.conductor = FakeConductor()
        self.out = io.StringIO()
        self.service: Idle | None = None
        self.services: list[Idle] = []
        self.engine: FakeEngine | None = None
        self.context = ProcessContext("x-0", Recorder("x-0", None), self.out)
        self.task: asyncio.Task[None] | None = None

    def build(self, shared: InstanceContext) -> tuple[Idle, object]:
        self.service = Idle(shared)
        self.services.append(self.service)
        return self.service, Stats(shared.instance)

    def roles(self, *, either: bool) -> list[EngineRole]:
        decode = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]
        prefill = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"]
        both = [
            EngineRole(kv_pb2.INSTANCE_KIND_DECODE, decode, self.build),
            EngineRole(kv_pb2.INSTANCE_KIND_PREFILL, prefill, self.build, lambda engine: 64),
        ]
        return both if either else both[:1]

    async def changed(self, services: int) -> conductor_pb2.JoinHello:
        """Waits until the instance has joined again, with so many services built so far."""
        async with asyncio.timeout(WAIT_S):
            while len(self.services) < services or self.services[-1].shared.instance != self.conductor.instance:
                self.conductor.has_load.clear()
                await self.conductor.has_load.wait()
        assert self.conductor.hello is not None
        return self.conductor.hello


class Stats:
    """Answers one RPC of each role."""

    def __init__(self, instance: kv_pb2.Instance) -> None:
        self._instance = instance

    async def DecodeStats(self, request: Any, context: Any) -> decode_pb2.DecodeStatsResponse:
        return decode_pb2.DecodeStatsResponse(instance=self._instance)

    async def PrefillStats(self, request: Any, context: Any) -> prefill_pb2.PrefillStatsResponse:
        return prefill_pb2.PrefillStatsResponse(instance=self._instance)


@asynccontextmanager
async def living(folder: Path, *, either: bool = False, **settings: Any) -> AsyncIterator[Life]:
    life = Life()

    @asynccontextmanager
    async def start(spec: EngineSpec, *, start_timeout_s: float, listener: StartListener) -> AsyncIterator[FakeEngine]:
        listener.loading(0, 1, 2)
        life.engine = FakeEngine(spec.blocks, layout=spec.layout)
        yield life.engine
        life.engine.pool.close()

    descriptor = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
    async with serving("127.0.0.1:0", [(descriptor, life.conductor)], grace_s=0.1) as server:
        settings = {"blocks": 4, "conductor": server.address, **settings}
        running = run_instance(life.context, config(folder, **settings), life.roles(either=either), start=start)
        life.task = asyncio.ensure_future(running)
        try:
            yield life
        finally:
            life.task.cancel()
            await asyncio.gather(life.task, return_exceptions=True)


async def test_joins_serves_and_drains(folder: Path) -> None:
    """While it drains it stays joined and says so; then it leaves."""
    async with living(folder) as life:
        await asyncio.wait_for(life.conductor.has_load.wait(), WAIT_S)
        hello, service = life.conductor.hello, life.service
        assert hello is not None
        assert service is not None
        told = [line for line in life.out.getvalue().splitlines() if not line.startswith("starting: ")]
        assert told == ["loading: 0 1/2", f"ready: {hello.instance.address}"]
        assert (hello.instance.id, hello.instance.epoch) == ("x-0", life.context.epoch)
        assert (hello.total_blocks, hello.model.name) == (4, "small-model")
        await probe(hello.instance.address, WAIT_S)
        life.conductor.has_load.clear()
        life.context.stopping.set()
        await asyncio.wait_for(life.conductor.has_load.wait(), WAIT_S)
        assert life.conductor.draining
        with pytest.raises(Unavailable):
            await probe(hello.instance.address, WAIT_S)
        service.finish.set()
        assert life.task is not None
        await asyncio.wait_for(life.task, WAIT_S)


async def test_dies_with_its_engine(folder: Path) -> None:
    async with living(folder) as life:
        await asyncio.wait_for(life.conductor.has_load.wait(), WAIT_S)
        assert life.engine is not None
        assert life.task is not None
        life.engine.fail("killed")
        with pytest.raises(Unavailable, match="killed"):
            await asyncio.wait_for(life.task, WAIT_S)


async def test_ends_when_the_conductor_serves_something_else(folder: Path) -> None:
    async with living(folder) as life:
        life.conductor.refusal = MismatchError("layout.dtype", "float32 here")
        assert life.task is not None
        with pytest.raises(MismatchError, match=r"layout\.dtype"):
            await asyncio.wait_for(life.task, WAIT_S)


async def test_drain_ends_in_time(folder: Path) -> None:
    """Requests that do not end are given up."""
    async with living(folder, drain_s=0.05) as life, Channels():
        await asyncio.wait_for(life.conductor.has_load.wait(), WAIT_S)
        life.context.stopping.set()
        assert life.task is not None
        await asyncio.wait_for(life.task, WAIT_S)


def to(kind: kv_pb2.InstanceKind.ValueType) -> conductor_pb2.JoinResponse:
    """An order to change the role."""
    return conductor_pb2.JoinResponse(role=conductor_pb2.RoleOrder(kind=kind))


async def test_changes_its_role_over_the_same_engine_at_the_same_address(folder: Path) -> None:
    """It joins again as another epoch; RPCs of the role that it has not are refused."""
    async with living(folder, either=True) as life, Channels() as channels:
        first = await life.changed(1)
        assert (first.instance.kind, first.either_role, first.in_place_role) == (DECODE, True, True)
        assert first.max_num_batched_tokens == 0
        channel = channels.get(first.instance.address)
        decode, prefill = DecodeServiceStub(channel), PrefillServiceStub(channel)
        answered: Any = await decode.DecodeStats(decode_pb2.DecodeStatsRequest())
        assert answered.instance == first.instance
        with pytest.raises(Unavailable, match="x-0 is no prefill instance now"):
            await prefill.PrefillStats(prefill_pb2.PrefillStatsRequest())

        life.conductor.send(to(DECODE))  # the role that it has
        life.conductor.send(to(PREFILL))
        life.services[0].finish.set()
        second = await life.changed(2)
        assert (second.instance.id, second.instance.address) == (first.instance.id, first.instance.address)
        assert (second.instance.kind, second.max_num_batched_tokens) == (PREFILL, 64)
        assert second.instance.epoch != first.instance.epoch
        assert second.speed.prefill_base_s == SPEEDS.prefill_base_s
        assert [service.draining for service in life.services] == [True, False]
        handover = life.services[1].shared.handover
        assert handover is not None
        assert handover.blocks is life.services[0].manager
        await probe(second.instance.address, WAIT_S)
        answered = await prefill.PrefillStats(prefill_pb2.PrefillStatsRequest())
        assert answered.instance == second.instance
        with pytest.raises(Unavailable, match="x-0 is no decode instance now"):
            await decode.DecodeStats(decode_pb2.DecodeStatsRequest())

        life.conductor.send(to(DECODE))
        life.services[1].finish.set()
        third = await life.changed(3)
        assert third.instance.kind == DECODE
        assert len({first.instance.epoch, second.instance.epoch, third.instance.epoch}) == 3
        told = [line for line in life.out.getvalue().splitlines() if line.startswith("ready: ")]
        assert told == [f"ready: {first.instance.address}"]


async def test_a_stop_during_a_change_of_roles_ends_the_instance(folder: Path) -> None:
    async with living(folder, either=True) as life:
        await life.changed(1)
        life.conductor.send(to(PREFILL))
        async with asyncio.timeout(WAIT_S):
            while not life.conductor.draining:
                life.conductor.has_load.clear()
                await life.conductor.has_load.wait()
        life.context.stopping.set()
        life.services[0].finish.set()
        assert life.task is not None
        await asyncio.wait_for(life.task, WAIT_S)
        assert len(life.services) == 1
        assert not life.services[0].handed_over


async def test_an_instance_with_one_role_keeps_it(folder: Path) -> None:
    async with living(folder) as life:
        hello = await life.changed(1)
        assert not hello.either_role
        life.conductor.send(to(PREFILL))
        life.conductor.has_load.clear()
        await asyncio.wait_for(life.conductor.has_load.wait(), WAIT_S)
        assert not life.services[0].draining
        assert not isinstance(life.services[0].shared.engine, RoleEngine)


@pytest.mark.parametrize("size", [0, 64])
async def test_steps_must_have_room_for_both_roles(folder: Path, size: int) -> None:
    """Where the device's memory decides how large steps are, as well."""
    flags = ["--conductor", "127.0.0.1:1", "--model", str(folder), "--set", "either_role=true"]
    settings = [f"--max-num-batched-tokens={size}"] if size else []
    both = PrefillProcessConfig.load([*flags, *settings, "--max-num-seqs", "700", "--set", "chunked_prefill_size=100"])
    assert engine_setup(both).spec.max_num_batched_tokens == 800
    assert (engine_setup(both).spec.graph_rows, engine_setup(both).spec.graph_prompts) == (700, True)
    assert engine_setup(both).spec.int8_head
    on_device = engine_setup(both.model_copy(update={"device": "cuda"})).spec
    assert on_device.max_num_batched_tokens == (800 if size else 0)
    alone = ["--set", "computes_prompts=true", "--max-num-batched-tokens=40"]  # less than a block, but not of prefill
    assert DecodeProcessConfig.load([*flags[:-2], *alone]).most_step_tokens > 40
    plain = PrefillProcessConfig.load(flags[:-2])
    assert (plain.roles, plain.most_decoded, plain.least_step_tokens) == (["prefill"], 0, 0)
    assert not engine_setup(plain).spec.int8_head


def test_settings_of_the_other_role_are_for_engines_that_may_have_it(folder: Path) -> None:
    flags = ["--conductor", "127.0.0.1:1", "--model", str(folder), "--set", "max_num_seqs=3"]
    with pytest.raises(ConfigError, match="no such setting") as refused:
        PrefillProcessConfig.load(flags)
    assert refused.value.field == "max_num_seqs"
    assert PrefillProcessConfig.load([*flags, "--set", "either_role=true"]).max_num_seqs == 3
    stages = DecodeProcessConfig.load([*flags, "--set", "either_role=true", "--set", "pipeline_parallel_size=2"])
    assert (stages.roles, stages.pipeline_parallel_size) == (["decode", "prefill"], 2)
