"""LoRA adapters at the conductor: chosen by model name, a part of the chain root, loaded and unloaded at run time."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.errors import ConfigError, InvalidRequest, MoonpoolError, NotFound, Overloaded, Unavailable
from moonpool.base.kv.keys import chain_root
from moonpool.base.sampling_params import LORA
from moonpool.conductor import loras
from moonpool.v1 import kv_pb2
from tests.unit.base.checkpoint.test_lora import write

from .fakes import ScriptedDecode, ScriptedPrefill
from .stack import Stack, stack
from .stores import FakeStore

PROMPT = list(range(40))


@dataclass
class Loras:
    """What an engine was told about adapters; `refusals` are raised by loads, first come first used."""

    loaded: list[kv_pb2.LoraAdapter] = field(default_factory=list)
    unloaded: list[bytes] = field(default_factory=list)
    lora_refusals: list[MoonpoolError] = field(default_factory=list)

    async def LoadLora(self, request: kv_pb2.LoadLoraRequest, context: Any) -> kv_pb2.LoadLoraResponse:
        if self.lora_refusals:
            raise self.lora_refusals.pop(0)
        self.loaded.append(request.lora)
        return kv_pb2.LoadLoraResponse(bytes=1)

    async def UnloadLora(self, request: kv_pb2.UnloadLoraRequest, context: Any) -> kv_pb2.UnloadLoraResponse:
        self.unloaded.append(request.id)
        return kv_pb2.UnloadLoraResponse()


@dataclass
class Prefill(Loras, ScriptedPrefill):
    """A prefill instance that takes adapters."""

    id: str = "prefill-0"
    kind: kv_pb2.InstanceKind.ValueType = kv_pb2.INSTANCE_KIND_PREFILL


@dataclass
class Decode(Loras, ScriptedDecode):
    """A decode instance that takes adapters."""

    id: str = "decode-0"
    kind: kv_pb2.InstanceKind.ValueType = kv_pb2.INSTANCE_KIND_DECODE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two adapters, `a` and `b`."""
    write(tmp_path / "a")
    write(tmp_path / "b", {"lora_alpha": 5})
    return tmp_path


@asynccontextmanager
async def running(folder: Path, *more: Any, **settings: Any) -> AsyncIterator[tuple[Stack, Prefill, Decode]]:
    prefill, decode = Prefill(), Decode()
    async with stack(prefill, decode, *more, lora_folder=folder, **settings) as conductor:
        yield conductor, prefill, decode


def names(conductor: Stack) -> list[str]:
    return [lora.name for lora in conductor.servicer.loras.known()]


async def test_a_request_names_an_adapter_as_model(folder: Path) -> None:
    """Both engines get the adapter; the chain root has the adapter's id, so that no other KV is hit."""
    async with running(folder, lora_modules=f"sql={folder / 'a'}") as (conductor, prefill, decode):
        plain = await conductor.client.generate(token_ids=PROMPT)
        named = await conductor.client.generate(token_ids=PROMPT, model=conductor.checkpoint.name)
        adapted = await conductor.client.generate(token_ids=PROMPT, model="sql", cache_salt="s")
        assert len(plain.token_ids) == len(named.token_ids) == len(adapted.token_ids)
        lora, space = read_adapter(folder / "a"), conductor.model().namespace
        for sequences in (
            [request.sequence for request in prefill.requests],
            [request.sequence for request in decode.requests],
        ):
            assert [sequence.HasField("lora") for sequence in sequences] == [False, False, True]
            asked = sequences[-1].lora
            assert (asked.id, asked.name, asked.path, asked.rank) == (lora.id, "sql", str(folder / "a"), 4)
            roots = [sequence.chain_root for sequence in sequences]
            assert roots == [*[chain_root(space, "")] * 2, chain_root(space, "", "s", lora.id)]
        state = await conductor.client.cluster_state()
        assert [(info.name, info.path, info.rank) for info in state.loras] == [("sql", str(folder / "a"), 4)]
        await conductor.rest()


async def test_an_unknown_name_is_refused(folder: Path) -> None:
    async with running(folder) as (conductor, _, _):
        with pytest.raises(InvalidRequest, match="only 'tiny' is served, not 'sql'") as refused:
            await conductor.client.generate(token_ids=PROMPT, model="sql")
        assert refused.value.field == "model"


async def test_instances_without_room_for_adapters_are_not_chosen(folder: Path) -> None:
    """They say so as they join; where no other one is there, the request is refused by name."""
    async with running(folder, lora_modules=f"sql={folder / 'a'}") as (conductor, prefill, _):
        plain = ScriptedPrefill("prefill-1", kv_pb2.INSTANCE_KIND_PREFILL)
        hello = await conductor.serve(plain)
        hello.unsupported.append(LORA)
        await conductor.follow(plain, hello)
        await conductor.joined(plain)
        for _ in range(3):
            await conductor.client.generate(token_ids=PROMPT, model="sql")
        assert (len(prefill.requests), len(plain.requests)) == (3, 0)
    plain, decode = ScriptedPrefill("prefill-1", kv_pb2.INSTANCE_KIND_PREFILL), Decode()
    async with stack(decode, lora_modules=f"sql={folder / 'a'}", lora_folder=folder) as conductor:
        hello = await conductor.serve(plain)
        hello.unsupported.append(LORA)
        await conductor.follow(plain, hello)
        await conductor.joined(plain)
        with pytest.raises(InvalidRequest, match="no engine of this cluster can serve it") as refused:
            await conductor.client.generate(token_ids=PROMPT, model="sql")
        assert refused.value.field == "model"


async def test_loaded_and_unloaded_at_run_time(folder: Path) -> None:
    async with running(folder) as (conductor, prefill, decode):
        info = await conductor.client.load_lora_adapter("sql", "a")
        assert (info.name, info.path, info.rank) == ("sql", str(folder / "a"), 4)
        assert [lora.name for lora in (*prefill.loaded, *decode.loaded)] == ["sql", "sql"]
        await conductor.client.generate(token_ids=PROMPT, model="sql")
        first = prefill.requests[-1].sequence.lora.id
        await conductor.client.unload_lora_adapter("sql")
        assert (prefill.unloaded, decode.unloaded) == ([first], [first])
        with pytest.raises(InvalidRequest, match="not 'sql'"):
            await conductor.client.generate(token_ids=PROMPT, model="sql")
        with pytest.raises(NotFound, match="no LoRA adapter 'sql' is loaded"):
            await conductor.client.unload_lora_adapter("sql")


async def test_a_changed_adapter_under_the_same_name_is_another(folder: Path) -> None:
    async with running(folder) as (conductor, prefill, _):
        await conductor.client.load_lora_adapter("sql", str(folder / "a"))
        with pytest.raises(InvalidRequest, match="load_inplace = true replaces it") as taken:
            await conductor.client.load_lora_adapter("sql", "b")
        assert taken.value.field == "lora_name"
        await conductor.client.generate(token_ids=PROMPT, model="sql")
        shutil.rmtree(folder / "a")
        write(folder / "a", {"lora_alpha": 9})
        await conductor.client.load_lora_adapter("sql", "a", load_inplace=True)
        await conductor.client.generate(token_ids=PROMPT, model="sql")
        old, new = (request.sequence for request in prefill.requests)
        assert old.lora.id != new.lora.id
        assert old.chain_root != new.chain_root
        assert prefill.unloaded == [old.lora.id]


async def test_two_names_of_one_adapter_share_kv(folder: Path) -> None:
    """The identity is the content; the engines keep the adapter until the last name is gone."""
    async with running(folder) as (conductor, prefill, _):
        for name in ("x", "y"):
            await conductor.client.load_lora_adapter(name, "a")
            await conductor.client.generate(token_ids=PROMPT, model=name)
        assert len({request.sequence.chain_root for request in prefill.requests}) == 1
        await conductor.client.unload_lora_adapter("x")
        assert prefill.unloaded == []
        await conductor.client.unload_lora_adapter("y")
        assert len(prefill.unloaded) == 1


@pytest.mark.parametrize("path", ["", "..", "../elsewhere", "/etc", "link", "a/../../elsewhere", "a\0"])
async def test_paths_lead_nowhere_else(path: str, folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    write(folder / "elsewhere")
    (inner / "link").symlink_to(folder / "elsewhere")
    async with running(inner) as (conductor, prefill, _):
        with pytest.raises(InvalidRequest) as refused:
            await conductor.client.load_lora_adapter("sql", path)
        assert refused.value.field == "lora_path"
        assert not prefill.loaded


async def test_nothing_is_loaded_at_run_time_without_a_folder() -> None:
    async with stack(Prefill(), Decode()) as conductor:
        with pytest.raises(InvalidRequest, match="without lora_folder") as refused:
            await conductor.client.load_lora_adapter("sql", "a")
        assert refused.value.field == "lora_path"


@pytest.mark.parametrize("name", ["", "a\n", "x" * 129])
async def test_names_are_checked(name: str, folder: Path) -> None:
    async with running(folder) as (conductor, _, _):
        for wrong in (name, conductor.checkpoint.name):
            with pytest.raises(InvalidRequest) as refused:
                await conductor.client.load_lora_adapter(wrong, "a")
            assert refused.value.field == "lora_name"


async def test_what_an_engine_refuses_is_refused_and_not_kept(folder: Path) -> None:
    async with running(folder) as (conductor, prefill, decode):
        decode.lora_refusals.append(InvalidRequest("sequence.lora", "LoRA adapter 'sql': lm_head takes no adapter"))
        with pytest.raises(InvalidRequest, match="lm_head takes no adapter") as refused:
            await conductor.client.load_lora_adapter("sql", "a")
        assert refused.value.field == "lora_path"
        assert len(prefill.unloaded) == 1
        decode.lora_refusals.append(Unavailable("no such folder here"))
        with pytest.raises(Unavailable, match="no such folder here"):
            await conductor.client.load_lora_adapter("sql", "a")
        write(folder / "wrong", {"use_dora": True})
        with pytest.raises(InvalidRequest, match="use_dora"):
            await conductor.client.load_lora_adapter("sql", "wrong")
        assert names(conductor) == []


async def test_without_engines_that_take_adapters_a_load_is_refused(folder: Path) -> None:
    async with stack(lora_folder=folder) as conductor:
        with pytest.raises(Unavailable, match="no prefill and no decode instance has joined"):
            await conductor.client.load_lora_adapter("sql", "a")
        plain = ScriptedPrefill("prefill-0", kv_pb2.INSTANCE_KIND_PREFILL)
        hello = await conductor.serve(plain)
        hello.unsupported.append(LORA)
        await conductor.follow(plain, hello)
        await conductor.joined(plain)
        with pytest.raises(InvalidRequest, match="no engine takes LoRA adapters") as refused:
            await conductor.client.load_lora_adapter("sql", "a")
        assert refused.value.field == "lora_path"


async def test_more_adapters_than_a_cluster_may_have_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loras, "MAX_LORAS", 1)
    async with running(folder) as (conductor, _, _):
        await conductor.client.load_lora_adapter("sql", "a")
        with pytest.raises(Overloaded) as refused:
            await conductor.client.load_lora_adapter("more", "b")
        assert refused.value.reason == "max_loras"
        await conductor.client.load_lora_adapter("sql", "b", load_inplace=True)
        assert names(conductor) == ["sql"]


async def test_one_of_several_instances_may_fail_to_load_and_later_to_unload(folder: Path) -> None:
    async with running(folder) as (conductor, prefill, _):
        second = Prefill("prefill-1")
        await conductor.join(second)
        await conductor.joined(second)
        second.lora_refusals.append(Unavailable("busy"))
        await conductor.client.load_lora_adapter("sql", "a")
        assert ([lora.name for lora in prefill.loaded], second.loaded) == (["sql"], [])
        await conductor.client.unload_lora_adapter("sql")
        assert (len(prefill.unloaded), len(second.unloaded)) == (1, 1)


async def test_an_instance_that_joins_later_loads_all(folder: Path) -> None:
    async with running(folder) as (conductor, _, _):
        await conductor.client.load_lora_adapter("sql", "a")
        later = Prefill("prefill-1")
        await conductor.join(later)
        await conductor.until(lambda: [lora.name for lora in later.loaded] == ["sql"])


async def test_conductors_share_adapters_through_kvstores(folder: Path) -> None:
    store = FakeStore()
    async with running(folder, store) as (conductor, _, _):
        await conductor.client.load_lora_adapter("sql", "a")
        await conductor.client.load_lora_adapter("gone", "b")
        await conductor.client.unload_lora_adapter("gone")
    other = FakeStore(replicated=store.replicated)
    async with running(folder, other, id="conductor-1") as (conductor, _, _):
        assert names(conductor) == ["sql"]


async def test_settings_go_before_what_was_kept_earlier(folder: Path) -> None:
    """An adapter of the settings that was unloaded at run time is there again after a restart."""
    store, settings = FakeStore(), {"lora_modules": f"sql={folder / 'a'}"}
    async with running(folder, store, **settings) as (conductor, _, _):
        await conductor.client.unload_lora_adapter("sql")
        assert names(conductor) == []
    other = FakeStore(replicated=store.replicated)
    async with running(folder, other, **settings) as (conductor, _, _):
        assert names(conductor) == ["sql"]


@pytest.mark.parametrize(
    ("modules", "words"),
    [("sql=/nowhere", "no adapter_config.json"), ("sql", "must be NAME=VALUE"), ("a=/x,a=/y", "stands there twice")],
)
async def test_settings_that_are_wrong_name_themselves(modules: str, words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words) as refused:
        async with stack(lora_modules=modules):
            pass
    assert "lora_modules" in str(refused.value)


async def test_a_context_may_be_of_an_adapter(folder: Path) -> None:
    """The context's KV is computed with the adapter; a request for the base model has its own."""
    async with running(folder, FakeStore(), lora_modules=f"sql={folder / 'a'}") as (conductor, prefill, _):
        made = await conductor.client.contexts.create(token_ids=PROMPT, model="sql")
        await prefill.until(lambda: len(prefill.requests) == 1)
        await conductor.client.generate(token_ids=[1, 2], context=made.id, model="sql")
        await conductor.client.generate(token_ids=[1, 2], context=made.id)
        assert [request.sequence.lora.name for request in prefill.requests] == ["sql", "sql", ""]
        with pytest.raises(InvalidRequest, match="not 'other'"):
            await conductor.client.contexts.create(token_ids=PROMPT, model="other")
