"""What the layers, the embedding and the output head of a model take in a step: for dividing layers into stages.

Torch-free. Costs are multiplications, rounded; only their ratios count.
"""

from typing import Final

from moonpool.base.checkpoint import ModelConfig
from moonpool.base.families.spec import LayerSpec
from moonpool.engine.footprint import layer_products

_FEW_ROWS: Final = 64
"""A product of fewer rows takes as long as one of so many: its weights are read whole."""


def layer_costs(model: ModelConfig, tokens: int) -> tuple[int, ...]:
    """Return what each layer takes in a step of one prompt's `tokens` tokens.

    The first layer has the embedding, too, and the last one the output head, which a step needs for few rows.
    """
    costs = [_layer_cost(model, layer, tokens) for layer in model.decoder.layers]
    costs[0] += tokens * model.hidden_size
    costs[-1] += _FEW_ROWS * model.hidden_size * model.vocab_size
    return tuple(costs)


def _layer_cost(model: ModelConfig, layer: LayerSpec, tokens: int) -> int:
    rows, experts, attention = max(tokens, _FEW_ROWS), layer.feed_forward.experts, layer.attention
    weights = sum(inputs * outputs for inputs, outputs, _ in layer_products(model, layer))
    cost = rows * weights
    if experts is not None:  # each chosen expert has three products; with few rows, weights of unlike experts are read
        cost += rows * experts.chosen * 3 * experts.inner * model.hidden_size
    if layer.recurrent is None:
        seen = min(attention.window or tokens, tokens / 2)
        cost += int(tokens * seen * 2 * attention.num_heads * attention.head_dim)
    return cost
