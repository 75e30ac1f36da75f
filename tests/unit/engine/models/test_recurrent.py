"""Recurrent layers: scans are their recurrence, and steps can be taken back."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.recurrent import StateSpan, scan, state_spans
from tests.unit.engine.models.forward import BLOCK, Runner, Sequence_
from tests.unit.engine.models.test_families import CASES, reference


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written."""
    found = []
    for at in range(q.shape[2]):
        fade = decay[:, :, at].exp()
        state = state * (fade[..., None] if fade.dim() == 3 else fade[..., None, None])
        taken = v[:, :, at]
        if step is not None:
            taken = step[:, :, at, None] * (taken - (k[:, :, at, None] @ state)[:, :, 0])
        state = state + k[:, :, at, :, None] * taken[:, :, None]
        found.append((q[:, :, at, None] @ state)[:, :, 0])
    return torch.stack(found, dim=2), state


@pytest.mark.parametrize("tokens", [1, 7, 16, 45])
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_tokens_together_are_tokens_one_by_one(tokens: int, fine: bool, delta: bool) -> None:
    draw = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    q, k, v = random(2, 3, tokens, 8), random(2, 3, tokens, 8) / 8**0.5, random(2, 3, tokens, 5)
    decay = -random(2, 3, tokens, *(8,) * fine).abs()
    step, state = random(2, 3, tokens).sigmoid() if delta else None, random(2, 3, 8, 5)
    found, expected = scan(q, k, v, decay, step, state), one_by_one(q, k, v, decay, step, state)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_fast_decay_is_no_infinity() -> None:
    ones = torch.ones(1, 1, 64, 4)
    found, state = scan(ones, ones, ones, torch.full((1, 1, 64), -50.0), None, torch.ones(1, 1, 4, 4))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(state, torch.ones(1, 1, 4, 4))


def test_spans_end_at_block_borders() -> None:
    batch = PackedBatch.build(
        [(bytes(4 * 20), 14, [5, 6, 7]), (bytes(4), 16, [8, 9]), (bytes(4 * 3), 0, [3])], BLOCK, full_hits=[2]
    )
    assert state_spans(batch) == [
        [StateSpan(0, 0, 2, 5, 5), StateSpan(0, 2, 18, None, 6), StateSpan(0, 18, 20, None, 7)],
        [StateSpan(1, 20, 21, 8, 9)],
        [StateSpan(2, 21, 24, None, None)],
    ]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    reference(*CASES["lfm2"]).save_pretrained(path)
    return path


def taken_twice(path: Path, back: list[int] | None, again: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of a step of three sequences, and of those in `again` when `back` was taken back and they step again."""
    runner, draw = Runner(path, torch.float32), torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 320, (length + 3,), generator=draw).tolist() for length in (20, 32, 5)]
    sequences = [Sequence_(prompt) for prompt in prompts]
    runner.step([(sequence, len(sequence.tokens) - 3) for sequence in sequences])
    work = [(sequences[0], 1), (sequences[1], 1), (sequences[2], 2)]
    first = runner.step(work)
    for stage in runner.stages:
        stage.undo.restore(back)
    for index in again:
        sequences[index].done -= work[index][1]
    return first, runner.step([work[index] for index in again])


def test_a_step_that_was_given_up_is_taken_again(hybrid: Path) -> None:
    first, second = taken_twice(hybrid, None, [0, 1, 2])
    torch.testing.assert_close(second, first)


def test_a_sequence_that_was_late_is_taken_again(hybrid: Path) -> None:
    first, second = taken_twice(hybrid, [0], [0])
    torch.testing.assert_close(second, first[:1])
    _, without = taken_twice(hybrid, [1], [0])
    assert not torch.allclose(without, first[:1])
