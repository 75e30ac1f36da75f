"""Compares compiled kernels with plain torch on the device that they run on, before a stage is ready.

A compiler can be wrong for one GPU about code that is right elsewhere: Triton 3.6 summed a column wrongly on an H200,
and a model gave wrong tokens. So while `checking`, each operation that a step hands to Triton runs first on drawn
numbers in the step's own shapes and types, once in Triton and once as `moonpool.engine.kernels.reference` has it. What
differs by more than rounding is replaced (`moonpool.engine.kernels.choice.REPLACED`), and an error is logged.
An indexer's choice is compared on small whole numbers, whose sums are exact.

Results are read on the host, so nothing is captured meanwhile. Blocks of the pool are overwritten.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moonpool.base.remedies import remedy
from moonpool.engine.kernels import reference
from moonpool.engine.kernels.choice import REPLACED
from moonpool.engine.kernels.drawn_arguments import Arguments, SeededDraws, drawn
from moonpool.engine.kernels.experts import ExpertMatrices
from moonpool.engine.kernels.triton.tiles import narrow_latent

log = logging.getLogger(__name__)

_CHOICES = {"add_weighted": "expert_linear", "chosen_attention": "attention", "prefill_attention": "attention"}
"""What `choice.choose` calls operations with other names."""
_LEAST = 2**-10
"""Of products of float32 on tensor cores, which read ten bits."""
STORED = {torch.int8: (0.02, 0.06), torch.float8_e4m3fn: (0.15, 0.02)}
"""What quantised KV may be off, where a rounding before moves a number to the next code; see `allowed`."""
_ROUNDED_BEFORE = 8
"""Times what turned heads may be off: a norm is rounded before, and what two numbers were rounded by stays where they
cancel each other.
"""
_FEW_ROWS, _AT_A_TIME = 16, 1 << 22
_running: SelfCheck | None = None


def running() -> SelfCheck | None:
    """Return the check that is under way."""
    return _running


def triton_ops() -> Any:
    """Return `moonpool.engine.kernels.triton.ops`, or what has the same operations and checks them."""
    from moonpool.engine.kernels.triton import ops

    return ops if _running is None else _CheckedOps(_running, ops)


@contextmanager
def checking(device: torch.device) -> Iterator[SelfCheck]:
    """Check what steps on `device` hand to Triton meanwhile."""
    global _running
    _running = SelfCheck(device)
    try:
        yield _running
    finally:
        _running = None


def allowed(dtype: torch.dtype, times: float = 1.0) -> tuple[float, float]:
    """Return what numbers of a type may differ by: relative to the number, and to its row's root mean square."""
    unit = 2 * times * max(torch.finfo(dtype).eps, _LEAST)
    return unit, unit


def largest_error(found: Tensor, right: Tensor, of_number: float, of_row: float) -> float:
    """Return the largest error of a number of `found`, in what is allowed: above 1 is wrong, NaN is infinite.

    Allowed are `of_number` of the number, and `of_row` of the root mean square of the number's row.
    """
    if found.shape != right.shape:
        return math.inf
    if not right.numel():
        return 0.0
    worst, width = 0.0, right.shape[-1]
    least = right.float().square().mean().sqrt() * 1e-6
    ours, theirs = found.reshape(-1, width), right.reshape(-1, width)
    rows = max(1, _AT_A_TIME // width)
    for part in (slice(begin, begin + rows) for begin in range(0, len(theirs), rows)):
        exact = theirs[part].float()
        size = exact.square().mean(-1, keepdim=True).sqrt() + least
        error = (ours[part].float() - exact).abs() / (of_number * exact.abs() + of_row * size + 1e-30)
        worst = max(worst, float(error.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return worst


class SelfCheck:
    """What has been compared, and what was found.

    Args:
        device: of the kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.draws = device, SeededDraws(device)
        self.compared = list[tuple[str, float]]()
        """Each operation, with its largest error as `largest_error` gives it."""
        self.found = list[str]()
        """What was wrong, as it is logged."""
        self._seen = set[tuple[str, Hashable]]()

    def due(self, operation: str, shape: Hashable) -> bool:
        """Tell whether the operation has still to be compared in this shape; the next time, not."""
        if (operation, shape) in self._seen or _CHOICES.get(operation, operation) in REPLACED:
            return False
        self._seen.add((operation, shape))
        return True

    def wait(self, operation: str, shape: Hashable) -> None:
        """Compare the operation in this shape with a smaller batch."""
        self._seen.discard((operation, shape))

    def next_step(self) -> None:
        """Compare attention once more: its kernel depends on the step."""
        self._seen = {seen for seen in self._seen if _CHOICES.get(seen[0]) != "attention"}

    def compare(
        self,
        operation: str,
        shape: str,
        kernel: Callable[[], Sequence[Tensor]],
        right: Callable[[], Sequence[Tensor]],
        limits: Sequence[tuple[float, float]],
        another: Callable[[], bool] | None = None,
    ) -> None:
        """Run both, and replace the operation if a number of `kernel`'s is wrong.

        Args:
            operation: as of `kernels.reference`, or as `choice.choose` knows it.
            shape: for the log.
            kernel: gives Triton's results.
            right: gives the reference's.
            limits: errors that each result may have, as for `largest_error`.
            another: lets `kernel` be another one from now on; returns whether there is another.
        """
        expected = right()
        error = self._error(kernel, expected, limits)
        self.compared.append((operation, error))
        if error <= 1:
            return
        instead = "plain torch takes its place, and is slower"
        if another is not None and another() and self._error(kernel, expected, limits) <= 1:
            instead = "a smaller tile takes its place"
        else:
            REPLACED.add(_CHOICES.get(operation, operation))
        self._tell(operation, shape, error, instead)

    @contextmanager
    def room(self, operation: str) -> Iterator[None]:
        """Draw and compare within: what there is no memory for is left, and a warning tells."""
        try:
            yield
        except torch.OutOfMemoryError:
            log.warning("%s was not compared with plain torch: there is no memory for that", operation)

    def _error(
        self, kernel: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor], limits: Sequence[tuple[float, float]]
    ) -> float:
        parts = zip(kernel(), expected, limits, strict=True)
        return max(largest_error(ours, right, *limit) for ours, right, limit in parts)

    def _tell(self, operation: str, shape: str, error: float, instead: str) -> None:
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        version = importlib.metadata.version("triton")
        self.found.append(
            f"a Triton kernel gives wrong results on this device: {operation}, {error:.3g} times what rounding explains"
            f" ({shape}; {gpu}, Triton {version}); {instead}"
        )
        log.error("%s (%s tells more)", self.found[-1], remedy(self.found[-1]))


class _CheckedOps:
    """Has the operations of `kernels.triton.ops`, and compares each in each shape before it runs."""

    def __init__(self, check: SelfCheck, ops: Any) -> None:
        self._check, self._ops = check, ops

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel: Callable[..., None] = getattr(self._ops, name)
        # Packed products are compared by `moonpool.engine.weights.packed`.
        return partial(self._run, name, kernel) if hasattr(reference, name) else kernel

    def _run(self, name: str, kernel: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        bound = inspect.signature(kernel).bind(*arguments, **keywords)
        bound.apply_defaults()
        given = dict(bound.arguments)
        if self._check.due(name, shape := _shape(given)):
            with self._check.room(name):
                own = drawn(self._check.draws, name, given)
                if own is not None:
                    self._compare(name, kernel, own)
                else:
                    self._check.wait(name, shape)
        replaced = _CHOICES.get(name, name) in REPLACED
        (_reference(name) if replaced else kernel)(**given)

    def _compare(self, name: str, kernel: Callable[..., None], given: Arguments) -> None:
        kv = given.get("kv")
        times = _ROUNDED_BEFORE if name == "norm_rope_write" else 1
        limits = [allowed(given[key].dtype, times) for key in ("out", "residual") if given.get(key) is not None]
        if name in ("choose_keys", "copy_blocks"):
            limits = [(0.0, 0.0)]
        elif name in ("write_kv", "norm_rope_write") and kv is not None:
            of_number, of_row = allowed(given["k" if name == "write_kv" else "qk"].dtype, times)
            more = STORED.get(kv.dtype, (0.0, 0.0))
            limits.append((of_number + more[0], of_row + more[1]))
        latent = _CHOICES.get(name) == "attention" and kv is not None and kv.shape[2] == 1
        self._check.compare(
            name, _described(given), partial(_results, name, kernel, given),
            partial(_results, name, _reference(name), given), limits,
            partial(narrow_latent, self._check.device) if latent else None,
        )  # fmt: skip


def _results(name: str, run: Callable[..., None], given: Arguments) -> list[Tensor]:
    """Return what an operation writes, with arguments that stay as they are but for the pool."""
    own = dict(given)
    for key in ("out", "residual"):
        if own.get(key) is not None:
            own[key] = own[key].clone()
    if own.get("out") is not None:
        own["out"].fill_(math.nan)
    if name == "choose_keys":
        own["places"].fill_(-1)
        own["numbers"].fill_(-1)
    stores = name in ("write_kv", "norm_rope_write") and own["kv"] is not None
    blocks = own["block_ids"].clamp_min(0).unique() if stores else None
    parts = [own[key] for key in ("kv", "scales") if stores and own[key] is not None]
    for part in parts:
        part[blocks] = torch.zeros_like(part[:1])
    run(**own)
    found = [own[key] for key in ("out", "residual") if own.get(key) is not None]
    if stores:
        kv, *scales = (part[blocks] for part in parts)
        found.append(reference.dequantize(kv, scales[0] if scales else None, torch.float32))
    if name == "choose_keys":
        found = [torch.cat((own["numbers"][:, None], own["places"]), 1).view(torch.uint8)]
    if name == "copy_blocks":
        found = [own["pool"][:, own["target"]].view(torch.uint8).flatten(1)]
    return found


def _reference(name: str) -> Callable[..., None]:
    """Return the reference of an operation, which leaves out keywords that say nothing about the result."""
    function = getattr(reference, name)
    known = inspect.signature(function).parameters

    def run(**given: Any) -> None:
        function(**{key: value for key, value in given.items() if key in known})

    return run


def _shape(given: Arguments) -> Hashable:
    """Return what kernels are compiled for; of rows, whether they are one, few or many."""
    found: list[Hashable] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            rows = value.shape[0] if value.dim() else 0
            found.append((name, value.dtype, value.shape[1:], (rows > 1) + (rows > _FEW_ROWS)))
        elif isinstance(value, ExpertMatrices):
            found.append((name, len(value.matrices), value.matrices[0].shape))
        elif is_dataclass(value):
            parts = ((field.name, getattr(value, field.name)) for field in fields(value))
            found += [(key, None if isinstance(part, Tensor) else part) for key, part in parts]
        elif not isinstance(value, tuple):
            found.append((name, value))
    return tuple(found)


def _described(given: Arguments) -> str:
    parts = ((name, value) for name, value in given.items() if isinstance(value, Tensor))
    return ", ".join(f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}" for name, value in parts)
