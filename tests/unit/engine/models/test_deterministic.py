"""A deterministic model's logits have the same bits in every batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moonpool.engine.kernels import kv_quantization
from moonpool.engine.kernels.deterministic import elementwise
from moonpool.engine.weights.linear import Linear
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.test_families import CASES, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [None, *kv_quantization.DTYPES.values()])
@pytest.mark.parametrize("mode", ["", "torch"])
def test_any_mix_of_chunks_and_decode_steps(
    dtype: torch.dtype,
    stored: torch.dtype | None,
    mode: str,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    assert_same_alone(Runner(checkpoint("tiny-qwen3"), dtype, stored=stored))


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *(
            (case, "")
            for case in (
                "qwen2_moe",
                "llama4",
                "deepseek_v32",
                "kimi_linear",
                "granite, hybrid",
                "lfm2_moe",
                "qwen3_next",
            )
        ),
        *(pytest.param(case, mode, marks=pytest.mark.slow) for case in CASES for mode in ("", "torch")),
    ],
)
def test_every_family(case: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    reference(*CASES[case]).save_pretrained(tmp_path)
    assert_same_alone(Runner(tmp_path, torch.float32))


@torch.inference_mode()
def assert_same_alone(runner: Runner) -> None:
    """Each sequence's logits have the same bits alone and in any mix of chunks and decode steps."""
    for stage in runner.stages:
        stage.deterministic = True
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (60, 5, 33, 48)]
    chunks = [(32, 27, 1), (4, 1), (16, 16, 1), (40, 7, 1)]

    alone = []
    for text, sizes in zip(texts, chunks, strict=True):
        sequence = Sequence_(list(text))
        alone.append(torch.cat([runner.step([(sequence, size)]) for size in sizes]))
    together: list[list[torch.Tensor]] = [[] for _ in texts]
    sequences = [Sequence_(list(text)) for text in texts]
    for turn, members in enumerate(([0, 1], [3, 0, 2], [2, 1, 3], [0, 2, 3])):
        work: list[tuple[Sequence_, int]] = []
        taken: list[tuple[int, int]] = []
        for s in members if turn % 2 else reversed(members):
            size = chunks[s][len(together[s])]
            work.append((sequences[s], size))
            taken.append((s, size))
        parts = torch.split(runner.step(work), [size for _, size in taken])
        for (s, _), rows in zip(taken, parts, strict=True):
            together[s].append(rows)
    for s, rows_of in enumerate(together):
        assert torch.equal(torch.cat(rows_of), alone[s]), s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["", "torch"])
def test_a_row_of_a_product_does_not_depend_on_its_place(
    dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FIXED_ROWS rests on, and what panels promise, for the shapes of real models."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    for inputs, outputs in ((64, 192), (512, 2816), (896, 1152)):
        linear = Linear(torch.randn(outputs, inputs).to(dtype))
        row = torch.randn(1, inputs).to(dtype)
        with torch.inference_mode():
            expected = linear(row, deterministic=True)
            for place, count in ((0, 2), (31, 32), (32, 33), (40, 100), (17, 20)):
                x = torch.randn(count, inputs).to(dtype)
                x[place] = row
                assert torch.equal(linear(x, deterministic=True)[place], expected[0])


@pytest.mark.parametrize("width", [1, 60, 96, 40_000])
def test_elements_of_a_row_do_not_depend_on_its_place(width: int) -> None:
    row = torch.randn(1, width, generator=torch.Generator().manual_seed(width))
    expected = elementwise(torch.sigmoid, row)
    for place, count in ((0, 2), (4, 5), (1, 3)):
        x = torch.zeros(count, width)
        x[place] = row
        assert torch.equal(elementwise(torch.sigmoid, x)[place], expected[0])
