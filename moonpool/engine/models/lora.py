"""LoRA adapters on a stage's products: outputs += up(down(inputs)), each row of a batch by its own adapter or none.

The base product stays as the stage holds it, packed, native or in torch. On a device adapters have slots
(`moonpool.engine.models.lora_slots`). Adapters of projections that are one product
are one pair of matrices: `down` has their ranks one below the other, `up` their outputs, with the scale multiplied in.
Every row is computed alone, so that its bits do not depend on other rows where the base product's do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.checkpoint.lora import WEIGHTS, LoraAdapter, LoraModule, check_rank, describe_adapter, read_settings
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.wrapped import wrapped_names
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.models.batch import BatchLoras
from moonpool.engine.models.lora_slots import LoraSlots, SlotLoras
from moonpool.engine.models.shards import slots_of_rank
from moonpool.engine.models.tensors import Slots, Stored, layer_tensors, outer_tensors, projections
from moonpool.engine.models.weights import LayerWeights
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.weights.linear import Linear, gated

_RANKS = 8
"""Ranks of a pair are filled up with zeros to a multiple of this: products take pairs of inputs in bfloat16."""
PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """One product's addition; `up` is gated if the product is, so that both have outputs in the same places."""

    down: Linear  # inputs to ranks
    up: Linear  # ranks to outputs

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return self.down.nbytes + self.up.nbytes

    def __call__(self, x: Tensor, *, deterministic: bool) -> Tensor:
        """Return the addition [rows, outputs] for `x` [rows, inputs]; of a gated product gates, then ups."""
        ranks = self.down(x, deterministic=deterministic)
        product = self.up.apart if self.up.gated else self.up
        return product(ranks, deterministic=deterministic)


@dataclass(frozen=True, slots=True)
class StageLora:
    """One adapter's part of a stage: additions by layer of the model, and by place in `LayerWeights`; or a slot."""

    id: bytes
    layers: Mapping[int, Mapping[str, LowRankPair]]
    slot: int = -1
    slot_bytes: int = 0
    native: dict[int, Any] = field(default_factory=dict, compare=False)
    """What native layers take, by the first of them (`moonpool.engine.models.native_step`)."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return self.slot_bytes + sum(part.nbytes for places in self.layers.values() for part in places.values())


class LoraLinear(Linear):
    """A product with additions, each for some rows."""

    def __init__(
        self, base: Linear, additions: Sequence[tuple[Tensor | None, LowRankPair]], others: Tensor | None
    ) -> None:
        """Make the product. `additions` have their rows [n] int64, None = all; `others`: rows without; None = none."""
        self.__dict__.update(base.__dict__)
        self._additions = additions
        self._others = others

    def __call__(
        self, x: Tensor, *, deterministic: bool = False, wide: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """As `Linear`."""
        assert not wide
        if not self.gated:
            result = super().__call__(x, deterministic=deterministic, out=out)
            for rows, addition in self._additions:
                part = x if rows is None else x[rows]
                _add(result, rows, addition(part, deterministic=deterministic))
            return result
        result = x.new_empty((x.shape[0], self.shape[0] // 2))
        if self._others is not None:
            result[self._others] = super().__call__(x[self._others], deterministic=deterministic)
        for rows, addition in self._additions:
            part = x if rows is None else x[rows]
            both = self.apart(part, deterministic=deterministic)
            both += addition(part, deterministic=deterministic)
            if rows is None:
                return gated(both, deterministic=deterministic)
            result[rows] = gated(both, deterministic=deterministic)
        return result


def _add(result: Tensor, rows: Tensor | None, addition: Tensor) -> None:
    if rows is None:
        result += addition
    else:
        result.index_add_(0, rows, addition)


def with_loras(loras: BatchLoras, index: int, weights: LayerWeights) -> LayerWeights:
    """Return layer `index` of the model, which has `weights`, with the additions of a batch's rows."""
    if index not in loras.layers:
        changed = _in_slots(loras, index, weights) if isinstance(loras, SlotLoras) else None
        loras.layers[index] = changed or _with_additions(loras, index, weights)
    found: LayerWeights = loras.layers[index]
    return found


def _in_slots(loras: SlotLoras, index: int, weights: LayerWeights) -> LayerWeights:
    made: Any = weights
    for place in loras.places(index):
        made = _replaced(made, place.split("."), partial(loras.linear, index, place))
    result: LayerWeights = made
    return result


def _with_additions(loras: BatchLoras, index: int, weights: LayerWeights) -> LayerWeights:
    places: dict[str, list[tuple[Tensor | None, LowRankPair]]] = {}
    for lora, rows in loras.adapted:
        for place, addition in lora.layers.get(index, {}).items():
            places.setdefault(place, []).append((rows, addition))
    made: Any = weights
    for place, additions in places.items():
        without = [rows for lora, rows in loras.adapted if place not in lora.layers.get(index, {})]
        bare = [rows for rows in (loras.base, *without) if rows is not None]
        others = torch.cat(bare) if bare else None
        made = _replaced(made, place.split("."), partial(LoraLinear, additions=additions, others=others))
    result: LayerWeights = made
    return result


def _replaced(part: PartT, path: Sequence[str], change: Callable[[Linear], Linear]) -> PartT:
    """Return a copy of `part` with another product at the end of `path`."""
    name, *rest = path
    linear: Any = getattr(part, name)
    new = _replaced(linear, rest, change) if rest else change(linear)
    return replace(part, **{name: new})  # type: ignore[type-var]


def load_lora(
    folder: Path,
    wanted: bytes,
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    layer_begin: int,
    *,
    max_rank: int,
    ranks: Ranks | None = None,
    slots: LoraSlots | None = None,
) -> StageLora:
    """Return the part of the adapter in `folder` for `layers`, the model's from `layer_begin` on.

    With `ranks`, `config` is the whole model's, and `layers` are this rank's. With `slots`, the adapter is in one.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor does not fit the model, or the content is not that of
            the id `wanted`.
        UnsupportedModel: the adapter changes something that takes no addition, or has a larger rank than `max_rank`;
            names setting, tensor or module.
        Unavailable: no slot is free.
    """
    if config.decoder.other:
        raise UnsupportedModel("lora", f"not for {config.architecture}, which transformers' own code computes")
    settings = read_settings(folder)
    try:
        content = (folder / WEIGHTS).read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}") from None
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    lora = describe_adapter(settings, blake3(content, max_threads=blake3.AUTO).digest(), shapes, folder)
    if lora.id != wanted:
        raise CheckpointError(f"{folder}: the adapter's files have changed since the adapter was loaded")
    check_rank(lora, max_rank)
    del content
    places = lora_places(config, lora)
    first = layers[0].product
    parts = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    arena, pairs = WeightArena(), dict[tuple[int, str], tuple[Tensor, Tensor]]()
    reader, found = _PairReader(lora.modules, parts, first.dtype), dict[int, dict[str, LowRankPair]]()
    with torch.inference_mode():
        for index, weights in enumerate(layers, layer_begin):
            for place, stored in _stored(config, index, weights, ranks).items():
                placed = [(part, places.get((index, name))) for name, part in stored.items()]
                if any(module is not None for _, module in placed):
                    pairs[index, place] = down, up = reader.pair(placed)
                    if slots is None:
                        base: Linear = attrgetter(place)(weights)
                        pair = LowRankPair(Linear(down, arena=arena), Linear(up, gated=base.gated, arena=arena))
                        found.setdefault(index, {})[place] = pair
                        del pairs[index, place]
        return StageLora(lora.id, found) if slots is None else _put(lora.id, pairs, slots)


def _put(lora: bytes, pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]], slots: LoraSlots) -> StageLora:
    slot = slots.take()
    try:
        slots.put(slot, pairs)
    except BaseException:
        slots.give_back(slot)
        raise
    return StageLora(lora, {}, slot, slots.slot_bytes)


def lora_slots(
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    layer_begin: int,
    *,
    count: int,
    max_rank: int,
    ranks: Ranks | None = None,
) -> LoraSlots:
    """Return memory for `count` adapters of a stage on a device; the others as for `load_lora`."""
    places = [
        {place: len(stored) for place, stored in _stored(config, index, weights, ranks).items()}
        for index, weights in enumerate(layers, layer_begin)
    ]
    with torch.inference_mode():
        return LoraSlots(layers, layer_begin, places, count=count, max_rank=max_rank, filled=_RANKS)


def _stored(
    config: ModelConfig, index: int, weights: LayerWeights, ranks: Ranks | None
) -> dict[str, dict[str, Stored]]:
    """Return the tensors of each product of a layer that takes additions, by place and slot."""
    slots = _slots(config, index)
    if ranks is not None:
        slots = slots_of_rank(slots, config.decoder.every[index], ranks.rank, ranks.ranks)
    return {
        place: {name: slots[f"{name}.weight"] for name in names.split()}
        for place, names in projections(weights.spec, slots).items()
    }


def lora_places(config: ModelConfig, lora: LoraAdapter) -> dict[tuple[int, str], str]:
    """Return the adapted module by layer and slot.

    Raises:
        UnsupportedModel: a module of the adapter takes no addition, or the model has no such module; names the module.
        CheckpointError: a module has another shape in the model.
    """
    renamed = FAMILIES[config.architecture].renamed
    left, found, taking = dict(lora.modules), dict[tuple[int, str], str](), set[str]()
    for index in range(config.num_layers):
        slots = _slots(config, index)
        for names in projections(config.decoder.layers[index], slots).values():
            for slot in names.split():
                stored = slots[f"{slot}.weight"]
                name = _module_name(stored, lora.modules, renamed)
                taking.add(stored.name.removesuffix(".weight").rpartition(".")[2])
                if name is None:
                    continue
                module = lora.modules[name]
                if (module.outputs, module.inputs) != stored.shape:
                    shape = [module.outputs, module.inputs]
                    raise CheckpointError(f"{name} has shape {shape} in the adapter, {list(stored.shape)} in the model")
                found[index, slot] = name
                left.pop(name, None)
    if left:
        name = min(left)
        why = f"takes no LoRA adapter: only {', '.join(sorted(taking))} do, outside experts"
        outer = {part.name.removesuffix(".weight") for part in outer_tensors(config).values()}
        if name in outer:
            why = "takes no LoRA adapter: neither embedding nor head do"
        raise UnsupportedModel(name, why)
    return found


def _module_name(stored: Stored, modules: Mapping[str, LoraModule], renamed: Mapping[str, str]) -> str | None:
    name = stored.name.removesuffix(".weight")
    others = (name.replace(ours, theirs) for ours, theirs in renamed.items() if ours in name)
    return next((known for known in (name, *wrapped_names(name), *others) if known in modules), None)


def _slots(config: ModelConfig, index: int) -> Slots:
    """Return a layer's tensors as linear modules have them, outputs first: adapters are stored so in any family."""
    names = replace(FAMILIES[config.architecture].names, inputs_first=False)
    return layer_tensors(config, index, names=names)


@dataclass(frozen=True, slots=True)
class _PairReader:
    """Makes pairs of matrices from an adapter's tensors, which have names without PEFT's prefix."""

    modules: Mapping[str, LoraModule]
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype

    def pair(self, parts: Sequence[tuple[Stored, str | None]]) -> tuple[Tensor, Tensor]:
        """Return the addition to a product of projections, each with its adapted module, if there is one.

        These are `down` [ranks, inputs] and `up` [outputs, ranks].

        Raises:
            CheckpointError: a tensor is missing, or a number is not finite: rows of other adapters would not be, too.
        """
        modules = dict.fromkeys(name for _, name in parts if name is not None)
        at, ranks = dict[str, int](), 0
        for name in modules:
            at[name], ranks = ranks, ranks + self.modules[name].rank
        outputs = sum(stored.kept_shape[0] for stored, _ in parts)
        width = -(-ranks // _RANKS) * _RANKS
        inputs = parts[0][0].inputs or (0, self._inputs(modules))  # of a rank: the inputs that it has
        down, up = torch.zeros(width, inputs[1] - inputs[0]), torch.zeros(outputs, width)
        for name, begin in at.items():
            down[begin : begin + self.modules[name].rank] = self._tensor(name, "A")[:, slice(*inputs)]
        row = 0
        for stored, module in parts:
            count = stored.kept_shape[0]
            if module is not None:
                rows = self._tensor(module, "B") * self.modules[module].scale
                arrange = stored.arrange if stored.inputs is None or stored.whole is None else stored.whole.arrange
                rows = rows if arrange is None else arrange(rows)
                up[row : row + count, at[module] : at[module] + self.modules[module].rank] = rows
            row += count
        down, up = down.to(self.dtype), up.to(self.dtype)
        if not (down.isfinite().all() and up.isfinite().all()):
            raise CheckpointError(f"{WEIGHTS}: {', '.join(modules)} has numbers that are not finite in {self.dtype}")
        return down, up

    def _inputs(self, modules: Mapping[str, None]) -> int:
        return self.modules[next(iter(modules))].inputs

    def _tensor(self, name: str, part: str) -> Tensor:
        for ending in ("", ".default"):
            if (found := self.tensors.get(f"{name}.lora_{part}{ending}.weight")) is not None:
                return found.float()
        raise CheckpointError(f"{WEIGHTS}: {name}.lora_{part}.weight is missing")
