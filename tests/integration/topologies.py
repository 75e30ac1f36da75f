"""The topologies of the parity tests: all of them, and a small selection that covers every axis."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.base.checkpoint.named_models import BUNDLED


@dataclass(frozen=True)
class Topology:
    """A checkpoint's shape and the stack that serves it.

    Attributes:
        shape: family of models; `BUNDLED` is the bundled model, with its trained weights.
        each: instances of prefill, and of decode.
        stages: pipeline stages of each prefill instance.
        store: whether there is a kvstore.
        dtype: of weights and KV.
        deterministic: whether the services run with `deterministic`.
        device: where the engines compute.
        transport: that KV takes.
        ranks: engine processes of each stage at prefill, and at decode.
    """

    shape: str
    each: int
    stages: int
    store: bool
    dtype: str
    deterministic: bool = False
    device: str = "cpu"
    transport: str = "local"
    ranks: tuple[int, int] = (1, 1)

    @property
    def exact(self) -> bool:
        """Whether an answer is the same whatever is cached and whatever else runs."""
        return self.dtype == "float32" or self.deterministic

    @property
    def recurrent(self) -> bool:
        """Whether layers have a recurrent state, so that a prompt's last block is computed even if it is cached."""
        return self.shape == "tiny-qwen3-next"

    def reused(self, tokens: int, block: int) -> int:
        """Tokens of a prompt that are reused if all of its full blocks are there."""
        return (tokens - 1) // block * block if self.recurrent else min(tokens // block * block, tokens - 1)

    def __str__(self) -> str:
        store, exact = "store" if self.store else "no-store", "-deterministic" if self.deterministic else ""
        device = "" if self.device == "cpu" else f"-{self.device}"
        ranks = "" if self.ranks == (1, 1) else f"-ranks{self.ranks[0]}to{self.ranks[1]}"
        name = f"{self.shape}-{self.each}p{self.each}d-stages{self.stages}-{store}-{self.dtype}{exact}"
        return f"{name}-{self.transport}{device}{ranks}"


SHAPES = ("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3")
F32, BF16 = "float32", "bfloat16"
SELECTED = [
    Topology("tiny-deepseek-v32", 2, 1, True, F32),
    Topology("tiny-gemma3", 1, 2, True, F32, transport="tcp"),
    Topology("tiny-qwen3-next", 1, 2, True, F32),
    Topology("tiny-llama", 1, 1, False, BF16, deterministic=True, transport="grpc"),
]
"""Every kind of layer (Llama's, windows, latent attention to chosen keys with experts, recurrent states), every
transport, and every value of the other axes, is in one of them at least. `tests/unit/engine/models` compares every
family."""
ALL = [Topology(*values) for values in itertools.product(SHAPES, (1, 2), (1, 2), (True, False), (F32, BF16))]
ON_GPU = [
    Topology("tiny-qwen3", 1, 1, True, F32, device="cuda"),
    Topology("tiny-llama", 1, 1, True, BF16, device="cuda"),
    Topology(BUNDLED, 1, 1, True, BF16, device="cuda"),
]
REST = [
    *(topology for topology in ALL if topology not in SELECTED),
    Topology("tiny-qwen3", 2, 2, False, BF16, deterministic=True),
    Topology("tiny-qwen2", 1, 1, True, BF16, transport="tcp", device="staged:5"),
    Topology("tiny-deepseek-v3", 1, 2, True, F32),
    Topology("tiny-deepseek-v32", 1, 2, True, F32),
    Topology("tiny-deepseek-v32", 1, 1, True, F32, device="staged:5"),
    Topology("tiny-mixtral", 2, 1, False, F32),
    Topology("tiny-qwen3-next", 2, 1, False, F32),  # in bfloat16 random recurrent layers explain any token
    Topology("tiny-qwen3-next", 1, 1, True, F32, device="staged:7"),
    Topology("tiny-llama", 2, 2, True, BF16, device="staged:11"),
    Topology(BUNDLED, 1, 1, True, BF16, device="staged:12"),
    Topology("tiny-qwen2", 1, 1, True, F32, ranks=(2, 1)),
    Topology("tiny-gemma3", 1, 2, False, F32, ranks=(2, 4)),
    Topology("tiny-deepseek-v3", 1, 1, True, F32, ranks=(1, 4)),
    Topology("tiny-mixtral", 1, 1, False, F32, ranks=(2, 1)),
    Topology("tiny-qwen3", 1, 1, True, F32, ranks=(4, 2)),
    Topology("tiny-llama", 1, 2, True, BF16, ranks=(1, 2)),
    Topology("tiny-gemma3", 1, 2, True, F32, device="staged:13", ranks=(2, 4)),
    Topology("tiny-deepseek-v32", 1, 1, True, F32, device="staged:17", ranks=(2, 1)),
    Topology("tiny-qwen2", 1, 1, True, BF16, device="staged:19", ranks=(1, 2)),
]


def missing(selected: Sequence[Topology]) -> set[object]:
    """Axes' values that some topology has and none of the selected ones."""
    return _covered(ALL) - _covered(selected)


def _covered(topologies: Sequence[Topology]) -> set[object]:
    axes = ("each", "stages", "store", "dtype")
    return {(axis, getattr(topology, axis)) for topology, axis in itertools.product(topologies, axes)}
