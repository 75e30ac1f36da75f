"""`transformers` with packed weights, dequantised, and rows in bytes: a plain torch forward pass to compare with."""

from typing import Any

import torch
from torch import Tensor, nn

from moonpool.engine.kernels.packed import bytes_of_rows
from moonpool.engine.weights.packing import PACKERS, pack_int8

GAP = 0.06
"""Of logits whose spread is 1 to 2.5: sums in another order let a number in ten thousand be rounded to another byte."""


@torch.inference_mode()
def pack(model: Any, quantization: str) -> Any:
    """Let each projection have the weights and the rows that `quantization` gives it, the head those of int8.

    "auto": a checkpoint's own codes, whose numbers the model has.
    """
    head: Any = model.lm_head
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if quantization != "auto":
                packed = pack_int8(module.weight) if module is head else PACKERS[quantization](module.weight)
                module.weight.copy_(packed.dequantise())  # a tied embedding, too
            module.register_forward_pre_hook(_rows_in_bytes)
    return model


def _rows_in_bytes(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
    del module
    x: Tensor = inputs[0]
    numbers, scales = bytes_of_rows(x.flatten(0, -2))
    return ((numbers * scales.repeat_interleave(32, 1)).view(x.shape).to(x.dtype),)
