"""What a stage reads of a checkpoint: tensors checked, renamed, stacked, and as numbers or codes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moonpool.base.checkpoint.formats import tensor_index
from moonpool.base.errors import CheckpointError
from moonpool.base.quantization import Quantization
from moonpool.engine.kernels.memory import LARGE_PAGE, mapped
from moonpool.engine.models.tensor_files import joined, stored_tensors
from moonpool.engine.models.tensors import Stored
from moonpool.engine.weights.linear import LinearWeight


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """How a stage keeps weights in memory.

    Attributes:
        quantization: "int8" or "int4" packs the layers' projections so, and the head in 8 bits; "auto" and
            "file" keep the codes of quantised weights if products take these numbers.
        int8_head: also hold an unpacked head as bytes (`moonpool.engine.kernels.int8_head`), if native code takes the
        head.
        imatrix: with "int4", a file that says how much each input counts (`moonpool.engine.models.imatrix`).
        file: the file that holds the weights which native kernels take, shared by all that load the same: a folder, and
            a name that says what weights these are, and how they are kept; None: they are in memory.
    """

    quantization: Quantization = "none"
    int8_head: bool = False
    file: Path | None = None
    imatrix: Path | None = None

    @property
    def codes(self) -> bool:
        """Whether quantised weights keep their codes."""
        return self.quantization in ("auto", "file")


DENSE_WEIGHTS = KeptWeights()
"""The element type of the stage for all weights."""


class TensorReader:
    """Checks and reads one checkpoint's tensors."""

    def __init__(self, path: Path, renamed: Mapping[str, str], place: Tensor) -> None:
        self._tensors = tensor_index(path)
        self._stored = stored_tensors(path)
        self._path = path
        self._renamed = renamed
        self._like = place
        self._changed: Counter[tuple[str, str]] = Counter()
        self.kept = DENSE_WEIGHTS
        """How weights are kept; set by the loader. If codes are, a dense quantised tensor is worth a note."""
        self.importance: Mapping[str, Tensor] = {}
        """What the inputs' errors count in weights that are packed, by name; set by the loader."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of what is read."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Device of what is read."""
        return self._like.device

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint has a tensor."""
        return self._name(name) in self._tensors

    def expect(self, wanted: Stored) -> None:
        """Raise CheckpointError unless the checkpoint has the tensor in this shape and a supported type."""
        name = self._name(wanted.name)
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._path}: tensor {wanted.name} is missing")
        if info.shape != wanted.shape:
            raise CheckpointError(
                f"{self._path}: tensor {name} has shape {list(info.shape)}, the configuration makes it "
                f"{list(wanted.shape)}"
            )
        if info.format is None and info.dtype not in self._stored.dtypes:
            known = ", ".join(sorted(self._stored.dtypes))
            raise CheckpointError(f"{self._path}: tensor {name} is stored as {info.dtype}, not {known}")

    def read(self, *wanted: Stored) -> Tensor:
        """Return the tensors stacked along their first dimension, in this reader's type and on this reader's device."""
        if self.kept.codes:
            self._note(wanted, "dense")
        if len(wanted) == 1 and wanted[0].arrange is not None:
            return wanted[0].arrange(self._copied(wanted[0])).contiguous()
        shapes = [part.kept_shape for part in wanted]
        fused = self._empty((sum(shape[0] for shape in shapes), *shapes[0][1:]))
        begin = 0
        for part, shape in zip(wanted, shapes, strict=True):
            target = fused[begin : begin + shape[0]]
            if part.arrange is None:
                self._copy(part, target)
            else:
                target.copy_(part.arrange(self._copied(part)))
            begin += shape[0]
        return fused

    def each(self, wanted: Stored) -> Iterator[Tensor]:
        """Yield a tensor of all experts as `read` gives it, an expert at a time: one of them is in memory."""
        if self.kept.codes:
            self._note((wanted,), "dense")
        name = self._name(wanted.name)
        for part in self._stored.each(name, self._tensors[name]):
            found = part if wanted.arrange is None else wanted.arrange(part)
            yield self._empty(tuple(found.shape[1:])).copy_(found[0])

    def packed(self, *wanted: Stored) -> LinearWeight | None:
        """Return the tensors as `read` does, in the codes of the checkpoint; None: they are dense."""
        packed = self._in_codes(wanted) if self.kept.codes else None
        return None if packed is None or packed.for_products() is None else packed

    def counts(self, wanted: Stored) -> Tensor | None:
        """Return what the errors of a weight's inputs count, by the importance matrix; None: all the same.

        Raises:
            CheckpointError: the importance matrix is of other inputs.
        """
        found = self.importance.get(wanted.name)
        inputs = (wanted.whole or wanted).kept_shape[-1]
        if found is not None and found.shape[-1] != inputs:
            raise CheckpointError(
                f"{self.kept.imatrix}: has {found.shape[-1]} numbers for the {inputs} inputs of {wanted.name}"
            )
        return found if found is None or wanted.inputs is None else found[..., slice(*wanted.inputs)]

    def packed_experts(self, wanted: Stored) -> list[LinearWeight] | None:
        """Return each expert's weight in a tensor of all experts, in the checkpoint's codes; None: they are dense."""
        info = self._tensors[self._name(wanted.name)]
        if not (self.kept.codes and info.keeps_codes):
            return None
        packed = self._stored.packed(self._name(wanted.name), info)
        assert packed is not None
        whole = wanted.whole or wanted
        count, outputs, _ = whole.kept_shape
        rows = torch.arange(outputs)
        if whole.arrange is not None:  # takes inputs first; gives rows other places
            rows = whole.arrange(rows.view(1, 1, outputs)).flatten()
        if wanted.cut_rows is not None:
            rows = wanted.cut_rows(rows)
        each = [
            packed.select(slice(begin, begin + outputs)).select(rows) for begin in range(0, count * outputs, outputs)
        ]
        if wanted.inputs is None:
            return each
        parts = [weight.narrow(*wanted.inputs) for weight in each]
        found = [part for part in parts if part is not None]
        return found if len(found) == len(each) else None

    def _note(self, wanted: Sequence[Stored], how: str) -> None:
        infos = [self._tensors[self._name(part.name)] for part in wanted]
        self._changed.update((info.stored_type, how) for info in infos if info.format is not None)

    def changed(self) -> str:
        """Return which quantised tensors are not held as the checkpoint has them, for people; "" if all are."""
        return ", ".join(f"{count} tensors of {kind} are {how}" for (kind, how), count in sorted(self._changed.items()))

    def _in_codes(self, wanted: Sequence[Stored]) -> LinearWeight | None:
        weights = []
        for part in wanted:
            whole = part.whole or part
            if len(part.shape) != 2 or part.shape != whole.kept_shape:
                return None
            name = self._name(part.name)
            weight = self._stored.packed(name, self._tensors[name])
            if weight is None:
                return None
            rows = part if part.inputs is None else whole
            if rows.arrange is not None:  # gives rows other places
                weight = weight.select(rows.arrange(torch.arange(weight.shape[0])))
            if part.inputs is not None:
                weight = weight.narrow(*part.inputs)
            if weight is None:
                return None
            weights.append(weight)
        return joined(weights)

    def _copied(self, part: Stored) -> Tensor:
        out = self._empty(part.shape)
        self._copy(part, out)
        return out

    def _copy(self, part: Stored, out: Tensor) -> None:
        name = self._name(part.name)
        self._stored.copy(name, self._tensors[name], out)

    def _name(self, name: str) -> str:
        """Return a tensor's name in this checkpoint."""
        if name in self._tensors:
            return name
        others = (name.replace(ours, other) for ours, other in self._renamed.items() if ours in name)
        return next((other for other in others if other in self._tensors), name)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for a tensor; a large tensor is dropped as soon as arranged, and must leave no memory behind."""
        dtype, device = self._like.dtype, self._like.device
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < LARGE_PAGE:
            return torch.empty(shape, dtype=dtype, device=device)
        return mapped(nbytes).view(dtype).view(shape)
