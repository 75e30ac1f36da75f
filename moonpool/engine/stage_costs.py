"""What the layers, the embedding and the output head of a model take in a step: for dividing layers into stages.

Torch-free. Costs are multiplications, rounded; only their ratios count.
"""

from typing import Final

from moonpool.base.checkpoint import ModelConfig
from moonpool.base.families.spec import LayerSpec
from moonpool.engine.footprint import layer_products

_FEW_ROWS: Final = 64
"""A product of fewer rows takes as long as one of so many: its weights are read whole."""
_FEW_ROWS_ON_CPU: Final = 16


def layer_costs(model: ModelConfig, tokens: int, *, on_cpu: bool = False, trimmed: bool = False) -> tuple[int, ...]:
    """Return what each layer takes in a step of one prompt's `tokens` tokens.

    The first layer has the embedding, too, and the last one the output head, which a step needs for few rows.

    Args:
        model: whose layers these are.
        tokens: of the prompt, all in one step.
        on_cpu: a plain CPU computes.
        trimmed: native kernels compute the layers that they know: of the last one, for rows without wanted logits,
            keys and values alone (`moonpool.engine.models.batch.logits_rows`).
    """
    layers, few = model.decoder.layers, _FEW_ROWS_ON_CPU if on_cpu else _FEW_ROWS
    costs = [_layer_cost(model, layer, tokens, tokens, few) for layer in layers]
    if trimmed and not model.decoder.not_native(len(layers) - 1):
        costs[-1] = _layer_cost(model, layers[-1], tokens, 1, few)
    costs[0] += tokens * model.hidden_size
    costs[-1] += few * model.hidden_size * model.vocab_size
    return tuple(costs)


def _layer_cost(model: ModelConfig, layer: LayerSpec, tokens: int, wanted: int, few: int) -> int:
    """Return what a layer takes whose result is wanted for the prompt's last `wanted` rows alone."""
    rows, experts, attention = max(wanted, few), layer.feed_forward.experts, layer.attention
    cost = rows * sum(inputs * outputs for inputs, outputs, _ in layer_products(model, layer))
    if experts is not None:  # each chosen expert has three products; with few rows, weights of unlike experts are read
        cost += rows * experts.chosen * 3 * experts.inner * model.hidden_size
    if wanted < tokens:
        cost += max(tokens - rows, 0) * model.hidden_size * 2 * attention.num_kv_heads * attention.head_dim
    if layer.recurrent is None:
        seen = min(attention.window or tokens, tokens - wanted / 2)
        cost += int(wanted * seen * 2 * attention.num_heads * attention.head_dim)
    return cost
