"""The flags that the build sheet, the stack and the documentation name."""

import pytest

from moonpool.base.errors import ConfigError
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.prefill.config import PrefillConfig

COMMON = ["--conductor", "127.0.0.1:50051", "--model", "m", "--dtype", "bfloat16", "--block-size", "32"]


def test_prefill_flags() -> None:
    flags = [
        "--kv-cache-memory-bytes",
        "1000",
        "--pipeline-parallel-size",
        "2",
        "--threads",
        "1",
        "--max-num-batched-tokens",
        "256",
    ]
    config = PrefillConfig.load([*COMMON, *flags, "--set", "link_bytes_per_s=5000", "--max-model-len", "77"])
    assert (
        config.block_size,
        config.kv_cache_memory_bytes,
        config.pipeline_parallel_size,
        config.max_num_batched_tokens,
    ) == (32, 1000, 2, 256)
    assert (config.link_rate, config.max_model_len, config.blocks) == (5000.0, 77, 0)
    assert PrefillConfig.load(COMMON).link_rate is None


def test_decode_flags() -> None:
    config = DecodeConfig.load([*COMMON, "--set", "blocks=9", "--max-num-seqs", "3", "--set", "lease_s=1.5"])
    assert (config.blocks, config.max_num_seqs, config.lease_s) == (9, 3, 1.5)
    assert config.write_back_limit(9) == 2


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--block-size", "24"), ("--pipeline-parallel-size", "0"), ("--conductor", "nowhere"), ("--dtype", "int8")],
)
def test_wrong_flags_are_named(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag.removeprefix("--").replace("-", "_")):
        PrefillConfig.load([*COMMON, flag, value])


def test_steps_below_a_block_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: must be at least one block \(32 tokens\), not 31"):
        PrefillConfig.load([*COMMON, "--max-num-batched-tokens", "31"])
    assert PrefillConfig.load([*COMMON, "--max-num-batched-tokens", "32"]).max_num_batched_tokens == 32


def test_auto_is_the_word_for_steps_that_suit_the_device() -> None:
    assert PrefillConfig.load([*COMMON, "--max-num-batched-tokens", "auto"]).max_num_batched_tokens == 0
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        PrefillConfig.load([*COMMON, "--max-num-batched-tokens", "some"])
