"""What the check at an engine's start allows, over many rows: other orders of sums are right, and one wrong row is not.

A kernel that is right is the reference here, whose float32 results differ as sums in another order do, and whose
probabilities are rounded for tensor cores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moonpool.engine.kernels import attention, ops
from moonpool.engine.kernels.attention import HeadNorms
from moonpool.engine.kernels.choice import REPLACED
from moonpool.engine.kernels.experts import ExpertMatrices
from moonpool.engine.kernels.self_check import SelfCheck, checking
from tests.unit.engine.kernels.kernels_of_torch import Break, Kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

BLOCK = 64
STORED = (None, torch.int8, torch.float8_e4m3fn)
MANY = pytest.mark.parametrize("rows", [200, pytest.param(4096, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
aten = torch.ops.aten
OF_A_ROW = {aten.mm.default: 2**-14, aten.bmm.default: 2**-14, aten.addmm.default: 2**-14}
"""What products differ by, of a row's root mean square: tensor cores cut off what thousands of sums are rounded by."""
OF_A_NUMBER = 2**-21
"""What others differ by: some units of float32."""
OTHERS = {aten.mean.dim, aten.rsqrt.default, aten.silu.default, aten.mul.Tensor, aten.native_layer_norm.default}


class AnotherOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets float32 results differ as in a kernel with another order of sums.

    Args:
        rounded: probabilities are rounded to this type.
    """

    def __init__(self, rounded: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounded, self._drawn = rounded, torch.Generator().manual_seed(11)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor) or found.dtype != torch.float32:
            return found
        if func.name() == "aten::_softmax":
            return found.to(self._rounded).float()
        if func in OF_A_ROW:
            size = found.square().mean(-1, keepdim=True).sqrt_()
            return found.addcmul_(self._noise(found), size, value=OF_A_ROW[func])
        return found.mul_(self._noise(found).mul_(OF_A_NUMBER).add_(1.0)) if func in OTHERS else found

    def _noise(self, like: Tensor) -> Tensor:
        return torch.empty_like(like).uniform_(-1.0, 1.0, generator=self._drawn)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    REPLACED.clear()
    yield Kernels(monkeypatch)
    REPLACED.clear()


def of_rows(rows: int, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Norms, activation, and heads that are normed, turned and stored."""
    heads, kv_heads, dim, width = 16, 4, 128, 1024
    x, ids = torch.zeros(rows, heads + 2 * kv_heads, dim, dtype=dtype), torch.arange(rows)
    kv, scales = pool(rows, kv_heads, dim, dtype, stored)
    angles, weight = x[:, 0].contiguous(), torch.ones(dim)
    norms = HeadNorms(weight, weight, None, None, 1e-6, centred=False, wide=False, last=False)
    qk, v = x[:, :-kv_heads], x[:, -kv_heads:]
    places = ids // BLOCK, ids % BLOCK
    for normed in (None, norms):
        attention.norm_rope_write(qk, v, heads, kv, *places, norms=normed, angles=(angles, angles), scales=scales)
    attention.write_kv(x[:, :kv_heads], v, kv, *places, scales=scales)
    ops.rope(x, angles, angles)
    wide = torch.zeros(rows, width, dtype=dtype)
    ops.rms_norm(wide, torch.ones(width, dtype=dtype), 1e-6, residual=wide.clone())
    for centred in (False, True):
        ops.norm(wide, torch.ones(width), None, 1e-6, centred=centred, wide=True)
    ops.silu_mul(torch.zeros(rows, 2 * width, dtype=dtype))


def of_experts(rows: int, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(1)
    matrices = [torch.randn(256, 512, generator=drawn).mul_(512**-0.5).to(dtype) for _ in range(4)]
    starts = torch.tensor([0, rows, rows, rows, rows])
    found = ops.expert_linear(torch.zeros(rows, 512, dtype=dtype), torch.arange(rows), starts, ExpertMatrices(matrices))
    ops.add_weighted(found, torch.arange(rows).view(-1, 2), torch.ones(rows // 2, 2))


def attend(rows: int, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """A prompt of all rows but 64, and 64 single rows."""
    kv, scales = pool(rows, 2, 128, dtype, stored)
    tables = torch.arange(len(kv)).int().expand(65, -1).contiguous()
    starts, lengths = torch.tensor([0, *range(rows - 64, rows + 1)]).int(), torch.full((65,), rows).int()
    attention.paged_attention(torch.zeros(rows, 8, 128, dtype=dtype), kv, tables, starts, lengths, 0.1, scales=scales)


def pool(
    tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, stored: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    kv = torch.zeros((-(-tokens // BLOCK), kv_heads, 2, BLOCK, dim), dtype=stored or dtype)
    return kv, None if stored is None else torch.zeros(kv.shape[:4])


def looked_at(check: SelfCheck, *operations: str) -> None:
    """All of these were compared, none exactly alike throughout; how near each is to its limit is printed."""
    for name, error in check.compared:
        print(f"{name}: {error:.2f} of what is allowed")
    assert {name for name, _ in check.compared} >= set(operations)
    assert max(error for _, error in check.compared) > 0.1, "results differ"
    assert not check.found


@MANY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", STORED)
def test_other_orders_of_sums_are_no_error(
    kernels: Kernels, rows: int, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    kernels.within = partial(AnotherOrder, dtype)
    with checking(torch.device("cpu")) as check:
        of_rows(rows, dtype, stored)
        attend(rows, dtype, stored)
        if stored is None:
            of_experts(rows, dtype)
    looked_at(check, "norm_rope_write", "write_kv", "rms_norm", "norm", "silu_mul", "rope", "prefill_attention")


def one_row_of_another(given: dict[str, Any]) -> None:
    given["out"][-1] = given["out"][-2]


def one_head_of_another(given: dict[str, Any]) -> None:
    given["out"].view(len(given["out"]), -1, 128)[7, 1] = given["out"].view(len(given["out"]), -1, 128)[7, 0]


def one_value_stored_elsewhere(given: dict[str, Any]) -> None:
    given["offsets"], given["block_ids"] = given["offsets"].clone(), given["block_ids"].clone()
    for part in (given["offsets"], given["block_ids"]):
        part[:2] = part[:2].flip(0)


@MANY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("name", "before", "behind", "run"),
    [
        ("prefill_attention", None, one_row_of_another, attend),
        ("prefill_attention", None, one_head_of_another, attend),
        ("norm_rope_write", None, one_row_of_another, of_rows),
        ("norm_rope_write", one_value_stored_elsewhere, None, of_rows),
        ("silu_mul", None, one_head_of_another, of_rows),
    ],
)
def test_one_wrong_row_among_many_is_noticed(
    kernels: Kernels,
    rows: int,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    name: str,
    before: Break | None,
    behind: Break | None,
    run: Callable[[int, torch.dtype, torch.dtype | None], None],
) -> None:
    kernels.within = partial(AnotherOrder, dtype)
    kernels.break_(name, before=before, behind=behind)
    with checking(torch.device("cpu")) as check:
        run(rows, dtype, stored)
    [said] = check.found
    assert f": {name}," in said
