"""Sizes that no flag gives: by the memory of devices and host, and shared with other engines."""

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.checkpoint import ModelConfig, inspect_checkpoint, kv_layout, load_config
from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.steps import STEP_TOKENS
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.footprint import device_footprint
from moonpool.engine.memory_estimate import estimated_memory
from moonpool.engine.messages import EngineSpec, StageRoom
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.platforms.base import DeviceCapacity
from moonpool.engine.platforms.registry import PLATFORMS, DeviceName, Platform
from moonpool.engine.platforms.stage_platform import open_device
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.setup import engine_setup
from moonpool.engine.sizes import choose_sizes
from tests.unit.base.checkpoint.folder import write_config

GIB = 1 << 30
H100 = StageRoom(total=80 * GIB, free=63 * GIB, processors=132, weights=16 * GIB)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    """With the shape of an 8B model."""
    return load_config(
        write_config(
            tmp_path, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=128_256, max_position_embeddings=131_072,
        )
    )  # fmt: skip


def spec(model: ModelConfig, **changes: object) -> EngineSpec:
    plain = EngineSpec("none", "bfloat16", kv_layout(model, "bfloat16", 64), 0, 0, device="cuda:0")
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_pool_takes_what_weights_and_steps_leave(model: ModelConfig) -> None:
    asked = spec(model)
    sizes = choose_sizes(model, asked, [[H100]], None)
    assert sizes.max_num_batched_tokens == 8192
    pool = sizes.blocks * asked.layout.block_bytes
    chosen = replace(asked, blocks=sizes.blocks, max_num_batched_tokens=sizes.max_num_batched_tokens)
    held = device_footprint(model, chosen, weights=H100.weights, pool=pool)
    assert 0.97 * 0.9 * H100.total < held.bound + GIB < 0.92 * H100.total
    assert pool + held.work + held.graphs < H100.free
    assert "90% of the device's memory" in sizes.why
    assert "81920 MiB" in sizes.why


def test_engines_on_one_gpu_have_room_for_each_other(model: ModelConfig) -> None:
    """Both may look before the other has taken anything."""
    asked = spec(model, memory_share=0.45)
    sizes = choose_sizes(model, asked, [[H100]], None)
    assert sizes.max_num_batched_tokens == 4096
    chosen = replace(asked, blocks=sizes.blocks, max_num_batched_tokens=sizes.max_num_batched_tokens)
    pool = sizes.blocks * asked.layout.block_bytes
    assert 2 * device_footprint(model, chosen, weights=H100.weights, pool=pool).bound < 0.9 * H100.total


def test_what_others_took_is_not_taken(model: ModelConfig) -> None:
    asked = spec(model)
    sizes = choose_sizes(model, asked, [[replace(H100, free=20 * GIB)]], None)
    assert sizes.blocks * asked.layout.block_bytes < 19 * GIB
    with pytest.raises(ConfigError, match="no room for a block") as caught:
        choose_sizes(model, asked, [[replace(H100, free=1 * GIB)]], None)
    assert caught.value.field == "kv_cache_memory_bytes"


def test_the_host_bounds_the_pool_too(model: ModelConfig) -> None:
    asked = spec(model)
    sizes = choose_sizes(model, asked, [[H100]], 8 * GIB)
    assert sizes.blocks == int(0.9 * 0.75 * 8 * GIB) // asked.layout.block_bytes
    assert "host" in sizes.why


def test_stages_on_one_device_divide_the_share_and_the_fullest_stage_decides(model: ModelConfig) -> None:
    half = replace(H100, weights=8 * GIB, free=60 * GIB)
    together = choose_sizes(model, spec(model, stages=2, device="cuda:0,cuda:0"), [[half], [half]], None)
    apart = choose_sizes(model, spec(model, stages=2, device="cuda:0"), [[half], [half]], None)
    alone = choose_sizes(model, spec(model), [[H100]], None)
    assert together.blocks < alone.blocks < 2 * alone.blocks < apart.blocks
    full = choose_sizes(model, spec(model, stages=2, device="cuda:0"), [[half], [replace(half, free=10 * GIB)]], None)
    assert full.blocks < apart.blocks / 3


def test_smaller_gpus_take_smaller_steps(model: ModelConfig) -> None:
    asked = spec(model)

    def tokens(room: StageRoom) -> int:
        return choose_sizes(model, asked, [[room]], None).max_num_batched_tokens

    assert tokens(replace(H100, processors=84)) == 4096
    assert tokens(replace(H100, processors=30)) == 2048
    assert tokens(StageRoom(24 * GIB, 7 * GIB, 128, 16 * GIB)) == 1024


def test_what_is_set_stays(model: ModelConfig) -> None:
    sizes = choose_sizes(model, spec(model, blocks=7), [[H100]], None)
    assert (sizes.blocks, sizes.max_num_batched_tokens) == (7, 8192)
    assert choose_sizes(model, spec(model, max_num_batched_tokens=320), [[H100]], None).max_num_batched_tokens == 320


def test_only_a_gpu_is_sized_by_its_memory(checkpoint: Path) -> None:
    plain = {"conductor": ("127.0.0.1:1",), "model": str(checkpoint)}

    def setup(config: PrefillConfig | DecodeConfig) -> tuple[int, int, float]:
        engine_spec = engine_setup(config).spec
        return (
            engine_spec.blocks * engine_spec.layout.block_bytes >> 20,
            engine_spec.max_num_batched_tokens,
            engine_spec.memory_share,
        )

    assert setup(PrefillConfig(**plain)) == (256, 512, 0.9)  # type: ignore[arg-type]
    assert setup(PrefillConfig(**plain, device="staged")) == (256, 512, 0.9)  # type: ignore[arg-type]
    assert setup(PrefillConfig(**plain, device="cuda", gpu_memory_utilization=0.4)) == (0, 0, 0.4)  # type: ignore[arg-type]
    assert setup(DecodeConfig(**plain, device="cuda")) == (0, 320, 0.9)  # type: ignore[arg-type]
    set_ = PrefillConfig(**plain, device="cuda", kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=2048)  # type: ignore[arg-type]
    assert setup(set_) == (1024, 2048, 0.9)


class ToyDevice:
    """What a new platform opens."""

    def __init__(self, number: int) -> None:
        self.number = number

    def capacity(self) -> DeviceCapacity:
        return DeviceCapacity(8 * GIB, 7 * GIB, 80)


@pytest.mark.parametrize("by_memory", [True, False])
def test_a_new_device_says_whether_its_memory_sizes_the_pool(
    by_memory: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Platform(kind="toy", usage="toy", device=f"{__name__}:ToyDevice", sized_by_memory=by_memory)
    monkeypatch.setitem(PLATFORMS, "toy", toy)
    plain = {"conductor": ("127.0.0.1:1",), "model": str(checkpoint), "device": "toy:1"}
    found = engine_setup(PrefillConfig(**plain)).spec  # type: ignore[arg-type]
    size = found.layout.block_bytes
    assert (found.blocks * size >> 20, found.max_num_batched_tokens) == ((0, 0) if by_memory else (256, 512))
    device = open_device(DeviceName.parse("toy:1"))
    assert isinstance(device, ToyDevice)
    told = device.capacity()
    room = StageRoom(told.total, told.free, told.processors, weights=GIB)
    sizes = choose_sizes(load_config(checkpoint), replace(found, blocks=0, max_num_batched_tokens=0), [[room]], None)
    assert sizes.blocks * size > 4 * GIB


def test_a_platform_that_does_not_say_how_it_is_sized_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="sized_by_memory"):
        Platform(kind="toy", usage="toy")  # type: ignore[call-arg]


def test_the_estimate_counts_a_window_once(tmp_path: Path) -> None:
    """Half of the layers have a window of three blocks; a pool for one context holds that and a step beside."""
    found = inspect_checkpoint(create("tiny-gemma3", tmp_path / "model", seed=1, dtype="float32"))
    model, layout = found.config, kv_layout(found.config, "float32", 16)
    blocks = layout.blocks_for(model.max_position_embeddings)
    spec = EngineSpec("", "float32", layout, blocks, max_tokens=model.max_position_embeddings)
    estimate = estimated_memory(found, spec)
    slots = layout.window_slots(blocks, STEP_TOKENS, model.max_position_embeddings)
    assert slots < blocks
    assert estimate.kv == layout.pool_bytes(blocks, slots) < blocks * layout.block_bytes
