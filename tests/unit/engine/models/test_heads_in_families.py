"""Norms of heads, rotation and KV write as one operation, as on GPUs: results are those of separate operations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.engine.kernels import choice
from moonpool.engine.kernels.attention import norm_rope_write
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.models import stage
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.test_families import CASES, reference

ONE = "norm_rope_write"
QUICK = ("qwen3", "gemma3", "hunyuan", "cohere, norms", "phi", "olmo2", "gemma4, embeddings for each layer")
"""Norms before and behind rotation, with one weight and one a head, over all heads; some elements turn; KV of another
layer. The others are slow."""


def logits(folder: Path, stored: torch.dtype | None) -> torch.Tensor:
    """Of prompts beside decode steps, across a block's end."""
    first, second = Sequence_(list(range(5, 40))), Sequence_(list(range(50, 80)))
    runner = Runner(folder, torch.float32, stored=stored)
    works = [[(first, 20)], [(first, 1), (second, 15)], *([(first, 1), (second, 1)] for _ in range(3))]
    return torch.cat([runner.step(work) for work in works])


def compare(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype | None = None) -> int:
    """Compare, and return how often one operation was taken."""
    reference(*CASES[case]).save_pretrained(folder)
    monkeypatch.setenv(VARIABLE, "torch")
    apart, choose, taken = logits(folder, stored), choice.choose, list[str]()

    def one(*args: Any, **how: Any) -> torch.Tensor:
        taken.append(ONE)
        return norm_rope_write(*args, **how)

    monkeypatch.setattr(choice, "choose", lambda name, *on: "triton" if name == ONE else choose(name, *on))
    monkeypatch.setattr(stage, ONE, one)
    torch.testing.assert_close(logits(folder, stored), apart, rtol=1e-5, atol=1e-5)
    return len(taken)


@pytest.mark.parametrize("case", QUICK)
def test_one_operation_gives_what_separate_ones_give(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare(case, tmp_path, monkeypatch)


def test_quantised_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare("qwen3", tmp_path, monkeypatch, torch.int8)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES.keys() - set(QUICK)))
def test_each_family(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have it in no layer."""
    compare(case, tmp_path, monkeypatch)
