"""An instance's LoRA adapters: loaded once, forgotten in order of use, never while a request uses them."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from moonpool.base.errors import (
    CheckpointError,
    InvalidRequest,
    MoonpoolError,
    Overloaded,
    Unavailable,
    UnsupportedModel,
)
from moonpool.base.telemetry.metrics import MetricSet
from moonpool.engine.loras import LORA_METRICS, InstanceLoras
from moonpool.v1 import kv_pb2


class Engine:
    """Loads at once, unless `before` is to be waited for, and notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.before: asyncio.Event | None = None
        self.refuses: MoonpoolError | None = None

    async def load_lora(self, lora: bytes, folder: str) -> int:
        self.told.append(f"load {lora.decode()} {folder}")
        if self.before is not None:
            await self.before.wait()
        if self.refuses is not None:
            raise self.refuses
        return 100

    async def drop_lora(self, lora: bytes) -> None:
        self.told.append(f"drop {lora.decode()}")


def lora(name: str) -> kv_pb2.LoraAdapter:
    return kv_pb2.LoraAdapter(id=name.encode(), name=name, path=f"/{name}")


def loras_of(engine: Engine, most: int, used: Callable[[], set[bytes]] = set) -> InstanceLoras:
    return InstanceLoras(engine, most, used)  # type: ignore[arg-type]


async def use(loras: InstanceLoras, *names: str) -> None:
    for name in names:
        async with loras.using(lora(name)):
            pass


async def until(condition: Callable[[], bool]) -> None:
    """Let tasks that are ready go on until the condition holds."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


async def test_requests_share_a_load() -> None:
    engine = Engine()
    engine.before = asyncio.Event()
    loras = loras_of(engine, 2)
    async with asyncio.TaskGroup() as group:
        group.create_task(use(loras, "a"))
        group.create_task(use(loras, "a"))
        await until(lambda: engine.told == ["load a /a"])
        engine.before.set()
    await use(loras, "a")
    assert engine.told == ["load a /a"]
    read = {gauge.name: gauge.value for gauge in MetricSet().add(LORA_METRICS, loras).read()}
    assert read == {"loras": 1, "lora_bytes": 100, "lora_loads_total": 1}


async def test_a_request_without_an_adapter_needs_nothing() -> None:
    loras = loras_of(Engine(), 0)
    async with loras.using(kv_pb2.LoraAdapter()) as nbytes:
        assert nbytes == 0
    with pytest.raises(InvalidRequest, match="without max_loras") as refused:
        await use(loras, "a")
    assert refused.value.field == "sequence.lora"


async def test_the_least_recently_used_makes_room() -> None:
    engine = Engine()
    loras = loras_of(engine, 2)
    await use(loras, "a", "b", "a", "c")
    assert engine.told[2:] == ["drop b", "load c /c"]
    await use(loras, "b")
    assert engine.told[4:] == ["drop a", "load b /b"]


async def test_adapters_in_use_stay() -> None:
    """Those of requests that run, and those of requests that are about to begin."""
    engine, used = Engine(), {b"a"}
    loras = loras_of(engine, 2, lambda: used)
    await use(loras, "a", "b", "c")
    assert engine.told[2:] == ["drop b", "load c /c"]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(loras.using(lora("c")))
        with pytest.raises(Overloaded) as full:
            await use(loras, "d")
        assert full.value.reason == "max_loras"
    used.clear()
    await use(loras, "d")
    assert engine.told[4:] == ["drop a", "load d /d"]


async def test_a_retired_adapter_goes_when_the_last_request_has_ended() -> None:
    engine, used = Engine(), {b"a"}
    loras = loras_of(engine, 2, lambda: used)
    await use(loras, "a", "b")
    loras.unload(kv_pb2.UnloadLoraRequest(id=b"b"))
    loras.unload(kv_pb2.UnloadLoraRequest(id=b"a"))
    loras.unload(kv_pb2.UnloadLoraRequest(id=b"never here"))
    await until(lambda: "drop b" in engine.told)
    assert len(loras) == 1
    loras.sweep()
    assert "drop a" not in engine.told
    used.clear()
    loras.sweep()
    await until(lambda: "drop a" in engine.told)
    assert (len(loras), loras.nbytes) == (0, 0)


async def test_a_retired_adapter_that_is_loaded_again_stays() -> None:
    engine, used = Engine(), {b"a"}
    loras = loras_of(engine, 2, lambda: used)
    await use(loras, "a")
    loras.unload(kv_pb2.UnloadLoraRequest(id=b"a"))
    assert (await loras.load(kv_pb2.LoadLoraRequest(lora=lora("a")))).bytes == 100
    used.clear()
    loras.sweep()
    assert engine.told == ["load a /a"]


@pytest.mark.parametrize(
    ("refuses", "raised", "words"),
    [
        (UnsupportedModel("bias", "not supported"), InvalidRequest, "LoRA adapter 'a': bias: not supported"),
        (CheckpointError("no such folder"), Unavailable, "LoRA adapter 'a': no such folder"),
        (Unavailable("the engine died"), Unavailable, "the engine died"),
    ],
)
async def test_a_load_that_fails_fails_its_requests_and_leaves_no_trace(
    refuses: MoonpoolError, raised: type[MoonpoolError], words: str
) -> None:
    engine = Engine()
    engine.refuses = refuses
    loras = loras_of(engine, 1)
    with pytest.raises(raised, match=words):
        await use(loras, "a")
    assert len(loras) == 0
    engine.refuses = None
    await use(loras, "a")
    assert engine.told == ["load a /a", "load a /a"]
