"""Profiles: what the bundled ones say, what a file may say, how they scale; and plans of emulated instances."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from moonpool.base.errors import ConfigError
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.config import EngineConfig
from moonpool.engine.emulated.profile import (
    EmulatedCompute,
    Profile,
    bundled_profiles,
    emulated_profile,
    load_profile,
    load_seconds,
    step_seconds,
)
from moonpool.engine.setup import engine_setup
from tests.unit.base.checkpoint.folder import write_config

FIELDS: dict[str, Any] = {
    "name": "x",
    "hardware": "some machine",
    "time_scale": 2.0,
    "model": {"kv_bytes_per_token": 6400, "max_tokens": 100_000},
    "kv": {"layers": 4, "kv_heads": 2},
    "prefill": {"base_s": 0.5, "per_token_s": "1e-3", "per_pair_s": 0},
    "decode": {"base_s": 0.25, "per_sequence_s": 0.01, "per_context_token_s": 0.001},
    "memory": {"device_bytes": 1e9, "weight_bytes": 4e8, "reserve_share": 0.1},
    "rates": {"load_bytes_per_s": 6400.0, "transfer_bytes_per_s": 3200.0},
}
SPEEDS = Speeds(0.5, 1e-3, 0.0, 0.25, 0.01, 0.001, 6400.0, 3200.0)


class AnyConfig(EngineConfig):
    """Settings of an engine instance."""


def config(folder: Path, **settings: Any) -> AnyConfig:
    return AnyConfig(**{"conductor": "127.0.0.1:1", "model": str(folder), "id": "x-0", **settings})


def changed(path: str, value: object) -> dict[str, Any]:
    """The fields with one of them changed, or removed when the value is None."""
    *outer, name = path.split(".")
    data = {key: dict(item) if isinstance(item, dict) else item for key, item in FIELDS.items()}
    target = data[outer[0]] if outer else data
    target[name] = value
    if value is None:
        del target[name]
    return data


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(FIELDS))
    profile = load_profile(str(path))
    assert profile == Profile("x", "some machine", SPEEDS, 6400, 100_000, 4, 2, 2.0, 500_000_000)
    assert profile.layout(32).block_bytes == 4 * 2 * 2 * 32 * 8
    assert profile.kv_scale == 128 / 6400


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("name", None, "name"),
        ("name", "two\nlines", "name"),
        ("hardware", 3, "hardware"),
        ("colour", "red", "colour"),
        ("model", [1], "model"),
        ("model.max_tokens", 0, r"model\.max_tokens"),
        ("model.kv_bytes_per_token", 1.5, r"model\.kv_bytes_per_token"),
        ("kv.layers", True, r"kv\.layers"),
        ("kv.width", 1, r"kv\.width"),
        ("prefill.base_s", -1, r"prefill\.base_s"),
        ("prefill.per_pair_s", None, r"prefill\.per_pair_s"),
        ("decode.base_s", "soon", r"decode\.base_s"),
        ("decode.per_sequence_s", float("nan"), r"decode\.per_sequence_s"),
        ("prefill.per_prompt_s", "long", r"prefill\.per_prompt_s"),
        ("memory.device_bytes", 4e8, r"memory\.device_bytes.*no room"),
        ("memory.weight_bytes", None, r"memory\.weight_bytes"),
        ("rates.load_bytes_per_s", float("inf"), r"rates\.load_bytes_per_s"),
        ("time_scale", 0, "time_scale"),
    ],
)
def test_a_wrong_profile_names_the_field(path: str, value: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as raised:
        Profile.from_mapping(changed(path, value), "mine.yaml")
    assert "mine.yaml" in str(raised.value)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama-70b-a800"):
        load_profile("nonsense")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="no YAML"):
        load_profile(str(path))
    path.write_text("- 1")
    with pytest.raises(ConfigError, match="mapping"):
        load_profile(str(path))


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles(name: str) -> None:
    """Each is valid, is called as its file is, and says nothing of a machine's paths."""
    profile = load_profile(name)
    assert profile.name == name
    assert profile.speeds.prefill_per_token_s > 0
    assert profile.speeds.decode_base_s > 0
    assert 0 < profile.kv_scale <= 1
    assert "/" not in profile.hardware


def compute(*, scale: float = 2.0, decode: bool = False) -> EmulatedCompute:
    return EmulatedCompute(Profile.from_mapping(FIELDS, "x"), scale, decode, 300)


def test_scaling_of_time_and_bytes() -> None:
    """Twice as fast: half the seconds; rates in emulated bytes, 128 for 6400, twice as many a second."""
    assert compute().speeds == Speeds(0.25, 5e-4, 0.0, 0.125, 0.005, 0.0005, 256.0, 128.0)


def test_step_times() -> None:
    speeds = Speeds(prefill_base_s=1.0, prefill_per_token_s=0.5, prefill_per_pair_s=0.25, decode_base_s=2.0,
                    decode_per_sequence_s=0.5, decode_per_context_token_s=0.125, load_bytes_per_s=32.0)  # fmt: skip
    chunk = SequenceStep(bytes(4 * 2), 10, (0,))
    step = Step(1, (chunk, SequenceStep(bytes(4), 0, (1,))))
    # 3 tokens; pairs 2 x 10 + 3 and 1; one fixed part for both.
    assert step_seconds(speeds, step, decode=False) == 1.0 + 3 * 0.5 + 24 * 0.25
    # Computed again in a decode step: as prefill, without its fixed part.
    assert step_seconds(speeds, step, decode=True) == 2.0 + 0.5 + 0.125 + 2 * 0.5 + 23 * 0.25
    assert load_seconds(speeds, 8 * 16) == 8 * 16 / 32
    assert load_seconds(Speeds(), 8 * 16) == 0.0


def test_what_flags_ask_for() -> None:
    assert emulated_profile("real", 0.0) is None
    found = emulated_profile("emulated:llama-70b-a800", 0.0)
    assert found is not None
    assert (found[0].name, found[1]) == ("llama-70b-a800", 1.0)
    assert emulated_profile("emulated:llama-70b-a800", 8.0) == (found[0], 8.0)
    with pytest.raises(ConfigError, match="engine"):
        emulated_profile("fast", 0.0)
    with pytest.raises(ConfigError, match=r"engine.*'emulated:PROFILE'"):
        emulated_profile("paced:llama-70b-a800", 0.0)
    with pytest.raises(ConfigError, match="time_scale"):
        emulated_profile("real", 2.0)


def test_plan_of_an_emulated_instance(tmp_path: Path) -> None:
    """It needs no weights, is longer than the checkpoint allows, and shares KV with nobody real."""
    folder, profile = tmp_path / "model", tmp_path / "mine.yaml"
    folder.mkdir()
    write_config(folder)
    profile.write_text(yaml.safe_dump(FIELDS))
    flags = {"engine": f"emulated:{profile}", "kv_cache_memory_bytes": 1 << 20}
    plan = engine_setup(config(folder, **flags), stages=2, decode=True)
    assert plan.spec.emulated is not None
    assert plan.spec.emulated == EmulatedCompute(
        load_profile(str(profile)), 2.0, True, plan.vocab_size, plan.spec.emulated.reserved, plan.spec.emulated.noise
    )
    assert (plan.max_tokens, plan.model.max_tokens, plan.model.emulated) == (100_000, 100_000, "x")
    assert (plan.spec.blocks, plan.spec.stages) == ((1 << 20) // (128 * DEFAULT_BLOCK_SIZE), 2)
    assert plan.link_rate == 3200.0 * 2 * 128 / 6400
    assert engine_setup(config(folder, **flags, link_bytes_per_s=5.0)).link_rate == 5.0
    assert engine_setup(config(folder, **flags, time_scale=9.0)).namespace == plan.namespace
    assert engine_setup(config(folder, **flags, max_model_len=77)).max_tokens == 77
    other = engine_setup(config(folder, engine="emulated:llama-70b-a800"))
    assert other.namespace != plan.namespace
    with pytest.raises(ConfigError, match="dtype"):
        engine_setup(config(folder, **flags, dtype="float32"))
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        engine_setup(config(folder, engine=f"emulated:{profile}", kv_cache_memory_bytes=10))


def test_the_default_pool_holds_as_many_tokens_as_the_hardware(tmp_path: Path) -> None:
    """500 MB of true KV at 6400 B a token, or 256 MiB where a profile says nothing of memory; flags go before both."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder)
    blocks = {}
    for name, fields in (("given", FIELDS), ("absent", changed("memory", None))):
        profile = tmp_path / f"{name}.yaml"
        profile.write_text(yaml.safe_dump(fields))
        flags = {"engine": f"emulated:{profile}"}
        blocks[name] = engine_setup(config(folder, **flags)).spec.blocks
        assert engine_setup(config(folder, **flags, kv_cache_memory_bytes=1 << 20)).spec.blocks == (1 << 20) // (
            128 * DEFAULT_BLOCK_SIZE
        )
        assert engine_setup(config(folder, **flags, blocks=7)).spec.blocks == 7
    block_bytes = 6400 * DEFAULT_BLOCK_SIZE
    assert blocks == {"given": 500_000_000 // block_bytes, "absent": (256 << 20) // block_bytes}
    paper = engine_setup(config(folder, engine="emulated:llama-70b-a800"))
    assert paper.spec.blocks * DEFAULT_BLOCK_SIZE == pytest.approx(1.46e6, rel=0.01)
