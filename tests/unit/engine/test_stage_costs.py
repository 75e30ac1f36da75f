"""What layers take, so that stages take the same."""

from pathlib import Path

import pytest

from moonpool.base.checkpoint import load_config
from moonpool.base.scheduling.steps import stage_ranges
from moonpool.engine.stage_costs import layer_costs
from tests.unit.base.checkpoint.folder import write_config


def costs(folder: Path, tokens: int) -> tuple[int, ...]:
    """Layers' costs in a step of so many tokens of a model like an 8B of Llama's."""
    write_config(
        folder,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    return layer_costs(load_config(folder), tokens)


def test_all_but_the_first_and_last_layer_of_a_plain_model_take_the_same(tmp_path: Path) -> None:
    first, *middle, last = costs(tmp_path, 2048)
    assert len(set(middle)) == 1
    expected = 2048 * (218.1e6 + 1024 * 2 * 4096)
    assert middle[0] == pytest.approx(expected, rel=0.1), "an 8B has 218.1e6 weights a layer"
    assert first - middle[0] == 2048 * 4096
    assert last - middle[0] == 64 * 4096 * 128256


@pytest.mark.parametrize(("tokens", "layers"), [(2048, 16), (64, 17), (1, 17)])
def test_the_output_head_counts_in_small_steps(tmp_path: Path, tokens: int, layers: int) -> None:
    assert stage_ranges(32, 2, costs=costs(tmp_path, tokens)) == [(0, layers), (layers, 32)]
