"""The seam of weight formats, walked once: a format of this file is read, held, and computed with.

`docs/extend/quantised_weights.md` describes the same steps.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.base.checkpoint import inspect_checkpoint, load_config, weight_formats
from moonpool.base.checkpoint.quantised import QUANT_METHODS
from moonpool.base.checkpoint.tensor_info import TensorInfo, WeightFormat
from moonpool.base.checkpoint.weight_formats import FolderFormat, Parts, Shape
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.weights import base, registry
from moonpool.engine.weights.base import WeightReader
from moonpool.engine.weights.linear import LinearMethod, LinearWeight
from moonpool.engine.weights.registry import WEIGHT_READERS
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.gguf_files import make_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SignsFormat(FolderFormat):
    """-1, 0 and 1 in a byte each, with one scale for each output."""

    name: str = "signs"
    values: tuple[str, ...] = (".signs",)
    dtypes: frozenset[str] = frozenset({"I8"})
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"scales": (".signs_scale",)})

    def dense_shape(self, parts: Parts) -> Shape:
        return parts["values"][1].shape


@dataclass(frozen=True)
class SignsWeight(LinearWeight):
    signs: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.signs.shape

    def dequantise(self) -> Tensor:
        return self.signs.float() * self.scales[:, None]

    def select(self, rows: Tensor | slice) -> SignsWeight:
        return SignsWeight(self.signs[rows], self.scales[rows])

    def join(self, others: Sequence[LinearWeight]) -> SignsWeight | None:
        every = [self, *(other for other in others if isinstance(other, SignsWeight))]
        if len(every) <= len(others):
            return None
        return SignsWeight(torch.cat([each.signs for each in every]), torch.cat([each.scales for each in every]))

    def to(self, device: torch.device) -> SignsWeight:
        return SignsWeight(self.signs.to(device), self.scales.to(device))

    def for_products(self) -> SignsWeight:
        return self

    def method(self, bias: Tensor | None, dtype: torch.dtype, *, gated: bool, arena: WeightArena) -> SignsMethod:
        arena.record(None)
        return SignsMethod(self, bias, dtype)


class SignsMethod(LinearMethod):
    def __init__(self, weight: SignsWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(dtype, weight.signs.device, weight.signs.nbytes + weight.scales.nbytes)
        self.weight, self.bias, self.products = weight, bias, 0

    def product(self, x: Tensor) -> Tensor:
        self.products += 1
        sums = x.float() @ self.weight.signs.float().t() * self.weight.scales
        return (sums if self.bias is None else sums + self.bias.float()).to(self.dtype)

    def dense(self) -> Tensor:
        return self.weight.dequantise().to(self.dtype)


class SignsReader(WeightReader):
    def __init__(self, form: SignsFormat) -> None:
        self.form = form

    def dense(self, parts: base.Parts) -> Tensor:
        return self.packed(parts).dequantise()

    def packed(self, parts: base.Parts) -> SignsWeight:
        return SignsWeight(parts["values"], parts["scales"].float())


@pytest.fixture
def signs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose projections are in the format, which is registered by two rows."""
    monkeypatch.setitem(QUANT_METHODS, "signs", lambda _settings, _key: (SignsFormat(),))
    readers: dict[Any, Any] = dict[Any, Any](WEIGHT_READERS) | {SignsFormat: SignsReader}
    monkeypatch.setattr(registry, "WEIGHT_READERS", readers)
    folder = make_folder("llama", tmp_path / "model")
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            signs = weight.sign().to(torch.int8)
            stored |= {f"{stem}.signs": signs, f"{stem}.signs_scale": weight.float().abs().mean(1)}
        else:
            stored[name] = weight
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "signs"}}))
    return folder


def test_a_format_is_read_held_and_computed_with_through_its_own_classes(signs_folder: Path) -> None:
    config = load_config(signs_folder)
    kept, dense = (
        load_stage(signs_folder, config, torch.float32, 0, config.num_layers, kept=KeptWeights(how))
        for how in ("auto", "none")
    )
    assert kept.changed_weights == ""
    layer: Any = kept.layers[1]
    other: Any = dense.layers[1]
    for linear, plain in (
        (layer.attention.qkv, other.attention.qkv),
        (layer.feed_forward.gate_up, other.feed_forward.gate_up),
    ):
        assert isinstance(linear.method, SignsMethod)
        assert torch.equal(linear.dense(), plain.dense())
    assert inspect_checkpoint(signs_folder, "float32").weight_bytes == kept.weight_bytes < dense.weight_bytes


def test_a_step_computes_with_the_formats_product(signs_folder: Path) -> None:
    tokens = [5 + 7 * at % 500 for at in range(40)]
    runners = [Runner(signs_folder, torch.float32, quantization=how) for how in ("auto", "none")]
    logits, want = (runner.step([(Sequence_(list(tokens)), len(tokens))]) for runner in runners)
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    layer: Any = runners[0].stages[0].layers[0]
    assert layer.feed_forward.down.method.products == 1


def test_each_format_has_a_reader() -> None:
    classes = [found for found in vars(weight_formats).values() if isinstance(found, type)]
    formats = {found for found in classes if issubclass(found, WeightFormat) and not inspect.isabstract(found)}
    assert formats == set(WEIGHT_READERS)


def test_a_format_without_codes_is_dense(signs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SignsWeight, "for_products", lambda _: None)
    config = load_config(signs_folder)
    stage = load_stage(signs_folder, config, torch.float32, 0, 1, kept=KeptWeights("auto"))
    assert "tensors of signs (I8) are dense" in stage.changed_weights


def test_an_info_without_a_format_is_numbers() -> None:
    info = TensorInfo(Path("model.safetensors"), "BF16", (4, 32))
    assert not info.keeps_codes
    assert info.stored_type == "BF16"
    assert info.stored_bytes == 256
    assert replace(info, format=SignsFormat()).keeps_codes
