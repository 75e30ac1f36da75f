"""What a machine can serve at most, from its matrix products and its memory; and rates over overlapping requests."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ceilings import best_shape, beyond_caches, product_flops, read_bytes_per_s, weights_memory
from benchmarks.device import device_limits
from benchmarks.frame import Row
from moonpool.base.checkpoint import load_config
from moonpool.engine.kernels.int8_head import int8_head_bytes
from moonpool.engine.models.loader import torch_dtype

MARGIN = 1.1
"""A figure so far above a limit is impossible; less is the limit's own noise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One request: when it began and ended, seconds of one clock, and its output tokens."""

    begin: float
    end: float
    tokens: int


def rate(spans: Sequence[Span]) -> float:
    """Output tokens per second, from the first request's start to the last one's end."""
    return sum(span.tokens for span in spans) / (max(span.end for span in spans) - min(span.begin for span in spans))


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do at most with a model.

    Attributes:
        parameters: that are multiplied for each token: all but the embedding's and the last layer's.
        head_parameters: of the last layer, multiplied for each token that is sampled.
        flops: of the best matrix product, per second.
        read_bytes_per_s: from memory.
        weight_bytes: of each parameter.
        int8_panels_bytes: that a greedy step of few sequences reads of the head instead; 0 where it reads the head.
        other_parameters: of experts that a token does not choose.
        chosen_share: of all experts, those that a token chooses.
    """

    parameters: int
    head_parameters: int
    flops: float
    read_bytes_per_s: float
    weight_bytes: float = 2
    int8_panels_bytes: int = 0
    other_parameters: int = 0
    chosen_share: float = 1.0

    @property
    def all_parameters(self) -> int:
        """Multiplied for each token that is sampled."""
        return self.parameters + self.head_parameters

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of a prompt per second: its products alone."""
        return self.flops / (2 * self.parameters)

    def read_parameters(self, batch: int) -> float:
        """Read by a step of so many sequences, each of which chooses its experts for itself, all as likely."""
        return self.all_parameters + self.other_parameters * (1 - (1 - self.chosen_share) ** (batch - 1))

    def decode_tokens_per_s(self, batch: int) -> float:
        """Tokens per second: products, and reading the weights once a step where they do not fit the caches."""
        limit, nbytes = self.flops / (2 * self.all_parameters), int(self.weight_bytes * self.read_parameters(batch))
        return min(limit, batch * self.read_bytes_per_s / nbytes) if beyond_caches(nbytes) else limit

    @property
    def int8_head_tokens_per_s(self) -> float:
        """Tokens of one sequence per second, by the bytes that its greedy steps read; 0 where they read all weights."""
        nbytes = int(self.weight_bytes * self.parameters) + self.int8_panels_bytes
        return self.read_bytes_per_s / nbytes if self.int8_panels_bytes and beyond_caches(nbytes) else 0.0

    def __str__(self) -> str:
        return (
            f"{self.all_parameters / 1e6:.1f} M parameters per token, "
            f"products {self.flops / 1e9:.0f} GFLOP/s, memory {self.read_bytes_per_s / 1e9:.1f} GB/s"
        )


def measured_limits(model: Path, dtype: str = "bfloat16", device: str = "cpu") -> Limits:
    """The limits of this machine for a checkpoint in an element type; on a GPU, where `device` is not the CPU."""
    config = load_config(model)
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    parameters = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    element = torch_dtype(dtype)
    head = config.vocab_size * config.hidden_size
    mixtures = [layer.feed_forward.experts for layer in config.decoder.layers if layer.feed_forward.experts is not None]
    others = sum(3 * config.hidden_size * its.inner * (its.count - its.chosen) for its in mixtures)
    share = mixtures[0].chosen / mixtures[0].count if mixtures else 1.0
    if device != "cpu":
        return Limits(parameters, head, *device_limits(element), element.itemsize, 0, others, share)
    flops = product_flops(best_shape(element), element)
    int8_head = int8_head_bytes(config.vocab_size, config.hidden_size, element)
    return Limits(parameters, head, flops, memory_now(), element.itemsize, int8_head, others, share)


def memory_now() -> float:
    """Bytes per second that this machine reads of weights. On a shared one it is another after a minute."""
    return read_bytes_per_s(weights_memory())


def with_limit(row: Row, limit: float, *, less_is_better: bool = False) -> Row:
    """The row, marked when the peer's figure beside it is beyond what this machine can do."""
    times = limit / row.limit_value if less_is_better else row.limit_value / limit
    if times <= MARGIN:
        return row
    return dataclasses.replace(
        row, limit_name=f"{row.limit_name} (impossible here: the limit is {limit:.3g} {row.unit})"
    )
