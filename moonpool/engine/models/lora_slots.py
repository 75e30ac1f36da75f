"""The LoRA adapters of a stage on a device: in memory at fixed places, so that graphs have their products.

The matrices `down` of all adapters lie one below the other, as one matrix, and so do the matrices `up`. So an addition
is two products for all rows of a step. Between both, a row keeps the numbers of its own adapter, and the others become
0. Loading an adapter writes to the memory of a slot, and changes no graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.base.errors import Unavailable
from moonpool.engine.kernels.deterministic import in_tiles
from moonpool.engine.kernels.to_device import send_to_device
from moonpool.engine.models.batch import BatchLoras
from moonpool.engine.models.weights import LayerWeights
from moonpool.engine.weights.linear import Linear, gated


@dataclass(frozen=True, slots=True)
class _Stack:
    """All adapters' matrices of one product."""

    down: Tensor  # [slots, ranks, inputs]
    up: Tensor  # [slots, ranks, outputs]

    def put(self, slot: int, down: Tensor | None, up: Tensor | None) -> None:
        """Write matrices of the host, [ranks, inputs] and [outputs, ranks] with fewer ranks at most; None: zeros."""
        for target, matrix in ((self.down[slot], down), (self.up[slot], None if up is None else up.t())):
            filled = torch.zeros(target.shape, dtype=target.dtype)
            if matrix is not None:
                filled[: len(matrix)] = matrix
            target.copy_(filled)  # over when the call is: both lie in one piece

    def __call__(self, x: Tensor, others: Tensor, *, deterministic: bool) -> Tensor:
        """Return additions [T, outputs] to the product of `x` [T, inputs]; `others` as of `SlotLoras`."""

        def product(rows: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
            return in_tiles(multiply, rows) if deterministic else multiply(rows)

        slots, ranks, _ = self.down.shape
        narrow = product(x, lambda rows: functional.linear(rows, self.down.flatten(0, 1)))
        narrow = narrow.view(len(x), slots, ranks).masked_fill_(others, 0.0).flatten(1)
        return product(narrow, lambda rows: rows @ self.up.flatten(0, 1))


class LoraSlots:
    """Memory for adapters of a stage's layers.

    Args:
        layers: the stage's weights.
        layer_begin: the first one's index in the model.
        places: of each layer, the products that take additions, by place, with the number of projections in each.
        count: adapters held at most.
        max_rank: the largest rank.
        filled: ranks are filled up to a multiple.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        layer_begin: int,
        places: Sequence[Mapping[str, int]],
        *,
        count: int,
        max_rank: int,
        filled: int,
    ) -> None:
        self.count, first = count, layers[0].product
        self.layers: dict[int, dict[str, _Stack]] = {}
        for index, (weights, of) in enumerate(zip(layers, places, strict=True), layer_begin):
            for place, parts in of.items():
                base: Linear = attrgetter(place)(weights)
                ranks = -(-parts * max_rank // filled) * filled
                down, up = (
                    torch.zeros((count, ranks, size), dtype=first.dtype, device=first.device)
                    for size in reversed(base.shape)
                )
                self.layers.setdefault(index, {})[place] = _Stack(down, up)
        self._free = set(range(count))
        self._lock = threading.Lock()

    @property
    def slot_bytes(self) -> int:
        """Memory of one adapter."""
        stacks = (stack for places in self.layers.values() for stack in places.values())
        return sum(stack.down[0].nbytes + stack.up[0].nbytes for stack in stacks)

    def take(self) -> int:
        """Return a slot for an adapter; any thread may call this method.

        Raises:
            Unavailable: all are taken.
        """
        with self._lock:
            if not self._free:
                raise Unavailable(f"all {self.count} LoRA adapters are held")
            return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Let others have a slot, which no step uses any more."""
        with self._lock:
            self._free.add(slot)

    def put(self, slot: int, pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]) -> None:
        """Write an adapter: `down` [ranks, inputs] and `up` [outputs, ranks] on the host, by layer and place."""
        for index, places in self.layers.items():
            for place, stack in places.items():
                stack.put(slot, *pairs.get((index, place), (None, None)))

    def of_sequences(self, slots: Sequence[int], query_start: Sequence[int]) -> SlotLoras:
        """Return the adapters of a batch on the host; `slots`: of each sequence, -1: none."""
        starts = torch.tensor(query_start)
        return SlotLoras(self, slots, torch.tensor(slots).repeat_interleave(starts[1:] - starts[:-1]))

    def of_rows(self, rows: Tensor) -> SlotLoras:
        """Return the adapters of a batch's rows [T] int64 on the device, -1: none."""
        return SlotLoras(self, (), rows)


class SlotLoras(BatchLoras):
    """The adapters of a batch's rows by their slots."""

    rows: Tensor

    def __init__(self, slots: LoraSlots, of: Sequence[int], rows: Tensor) -> None:
        self._slots, self._of_sequences, self.rows = slots, of, rows
        self._others: Tensor | None = None
        self.layers: dict[int, Any] = {}

    @property
    def others(self) -> Tensor:
        """Slots that are not a row's own, [T, slots, 1] bool; made with the batch's first addition."""
        if self._others is None:
            every = torch.arange(self._slots.count, device=self.rows.device)
            self._others = (self.rows[:, None] != every)[..., None]
        return self._others

    def of_steps(self) -> SlotLoras:
        return SlotLoras(self._slots, self._of_sequences, torch.tensor(self._of_sequences))

    def to(self, query_start: Tensor, device: torch.device | str) -> SlotLoras:
        del query_start
        return SlotLoras(self._slots, self._of_sequences, send_to_device(self.rows, device))

    def linear(self, index: int, place: str, base: Linear) -> Linear:
        """Return the product of layer `index` at `place` with the rows' additions."""
        return _SlotLinear(base, self._slots.layers[index][place], self)

    def places(self, index: int) -> Sequence[str]:
        """Return the places of layer `index` that take additions."""
        return tuple(self._slots.layers.get(index, ()))


class _SlotLinear(Linear):
    """A product with the additions of all adapters."""

    def __init__(self, base: Linear, stack: _Stack, loras: SlotLoras) -> None:
        self.__dict__.update(base.__dict__)
        self._stack, self._loras = stack, loras

    def __call__(
        self, x: Tensor, *, deterministic: bool = False, wide: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """As `Linear`."""
        assert not wide
        del out
        addition = self._stack(x, self._loras.others, deterministic=deterministic)
        if not self.gated:
            return super().__call__(x, deterministic=deterministic).add_(addition)
        return gated(self.apart(x, deterministic=deterministic).add_(addition), deterministic=deterministic)
