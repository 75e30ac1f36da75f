"""The flags that the build sheet, the stack and the documentation name."""

import pytest

from moonpool.errors import ConfigError
from services.decode.config import DecodeConfig
from services.prefill.config import PrefillConfig

COMMON = ["--conductor", "127.0.0.1:50051", "--model", "m", "--dtype", "bfloat16", "--block-tokens", "32"]


def test_prefill_flags() -> None:
    flags = ["--kv-bytes", "1000", "--stages", "2", "--threads", "1", "--step-tokens", "256"]
    config = PrefillConfig.load([*COMMON, *flags, "--link-bytes-per-s", "5000", "--max-tokens", "77"])
    assert (config.block_tokens, config.kv_bytes, config.stages, config.step_tokens) == (32, 1000, 2, 256)
    assert (config.link_rate, config.max_tokens, config.blocks) == (5000.0, 77, 0)
    assert PrefillConfig.load(COMMON).link_rate is None


def test_decode_flags() -> None:
    config = DecodeConfig.load([*COMMON, "--blocks", "9", "--max-batch", "3", "--lease-s", "1.5"])
    assert (config.blocks, config.max_batch, config.lease_s) == (9, 3, 1.5)
    assert config.write_back_limit(9) == 2


@pytest.mark.parametrize(
    ("flag", "value"), [("--block-tokens", "24"), ("--stages", "0"), ("--conductor", "nowhere"), ("--dtype", "int8")]
)
def test_wrong_flags_are_named(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag.removeprefix("--").replace("-", "_")):
        PrefillConfig.load([*COMMON, flag, value])
