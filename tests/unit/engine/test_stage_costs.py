"""What layers take, so that stages take the same."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import load_config
from moonpool.base.scheduling.steps import stage_ranges
from moonpool.engine.stage_costs import layer_costs
from tests.unit.base.checkpoint.folder import write_config

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
}
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "query_pre_attn_scalar": 64,
    "sliding_window": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}


def costs(folder: Path, tokens: int, **config: Any) -> tuple[int, ...]:
    """Layers' costs in a step of so many tokens of a model like an 8B of Llama's, on a device."""
    write_config(folder, **LLAMA_8B | config)
    return layer_costs(load_config(folder), tokens)


def test_all_but_the_first_and_last_layer_of_a_plain_model_take_the_same(tmp_path: Path) -> None:
    first, *middle, last = costs(tmp_path, 2048)
    assert len(set(middle)) == 1
    assert middle[0] == 2048 * (218_103_808 + 1024 * 2 * 4096), "an 8B has 218.1e6 weights a layer"
    assert first - middle[0] == 2048 * 4096
    assert last - middle[0] == 64 * 4096 * 128256


@pytest.mark.parametrize(("tokens", "layers"), [(2048, 16), (64, 17), (1, 17)])
def test_the_output_head_counts_in_small_steps(tmp_path: Path, tokens: int, layers: int) -> None:
    assert stage_ranges(32, 2, costs=costs(tmp_path, tokens)) == [(0, layers), (layers, 32)]


@pytest.mark.parametrize(
    ("config", "tokens", "measured"),
    [({}, 512, 0.189), (MIXTURE, 1024, 0.112), (GEMMA, 512, 1.0)],
    ids=["dense", "mixture", "not native"],
)
def test_the_last_layer_takes_what_was_measured_on_a_cpu(
    tmp_path: Path, config: dict[str, Any], tokens: int, measured: float
) -> None:
    """With the head, in middle layers' processor seconds: native kernels compute keys and values of most rows alone."""
    write_config(tmp_path, **SMALL | config)
    found = layer_costs(load_config(tmp_path), tokens, on_cpu=True, trimmed=True)
    assert found[-1] / found[2] == pytest.approx(measured, abs=0.03)


def test_the_last_layer_of_a_step_whose_rows_are_all_wanted_is_whole(tmp_path: Path) -> None:
    write_config(tmp_path, **SMALL)
    found = layer_costs(load_config(tmp_path), 512, on_cpu=True)
    assert found[-1] - found[2] == 16 * 512 * 4096
