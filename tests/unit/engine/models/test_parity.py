"""Greedy output equals that of transformers, on random checkpoints of every architecture."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from moonpool.base.checkpoint import load_config
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.several_shapes import with_repeated_heads

SHAPES = ("tiny-llama", "tiny-llama3", "tiny-mistral", "tiny-qwen2", "tiny-qwen3")
LENGTHS = (5, 16, 75, 33)
NEW = 12
#: float32 sums round differently in different shapes: below this gap between the two highest logits either is right.
TIE = 1e-4
#: Teacher-forced, a token chosen in lower precision may be so far below the float32 maximum, in standard deviations of
#: the logits.
FURTHER = 1.5
"""Times the error of transformers in the same precision."""
PREFIX, CHUNK = 32, 32
LOST = {torch.bfloat16: 0.15, torch.float16: 0.02}


def reference(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    model.train(False)
    return model


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def assert_greedy(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Every token of `output` is the reference's most likely one, given prompt and the tokens before."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    top = logits.topk(2, dim=-1)
    for row, token in enumerate(output):
        if top.values[row, 0] - top.values[row, 1] >= TIE:
            assert token == int(top.indices[row, 0]), f"token {row}"
        else:
            assert token in top.indices[row].tolist(), f"token {row}"


@pytest.mark.parametrize("stored", [None, torch.int8])
def test_layers_may_differ_in_the_shape_of_their_kv(
    stored: torch.dtype | None, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each KV head twice in every other layer changes no token."""
    path = checkpoint("tiny-llama")
    config = with_repeated_heads(path, tmp_path)
    texts = prompts(config.vocab_size)
    runner = Runner(tmp_path, torch.float32, borders=(1,), stored=stored, config=config)
    assert [layer.shape[1] for layer in runner.pool] == [2, 4, 2, 4]
    found = runner.generate(texts, NEW, chunk=16, budget=40)
    expected = Runner(path, torch.float32, borders=(1,), stored=stored).generate(texts, NEW, chunk=16, budget=40)
    assert found == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_in_chunks_and_mixed_batches_and_two_stages(shape: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(shape)
    texts = prompts(load_config(path).vocab_size)
    whole = Runner(path, torch.float32).generate(texts, NEW, chunk=1000, budget=1000)
    # A budget of 40 rows mixes a chunk of one prompt with decode steps of those before it.
    chunked = Runner(path, torch.float32, borders=(1,)).generate(texts, NEW, chunk=16, budget=40)
    assert len({tuple(output) for output in whole}) == len(texts)
    model = reference(path, torch.float32)
    for prompt, output, other in zip(texts, whole, chunked, strict=True):
        assert_greedy(model, prompt, output)
        assert_greedy(model, prompt, other)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_logits_are_close_in_float32(shape: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(shape)
    tokens = prompts(load_config(path).vocab_size)[2]
    logits = Runner(path, torch.float32).step([(Sequence_(tokens), len(tokens))])
    expected = reference(path, torch.float32)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@torch.inference_mode()
def teacher_forced(path: Path, dtype: torch.dtype, *, dropped: int) -> list[tuple[float, float]]:
    """Of a chunk behind a prefix, and of decode steps: (error over transformers' own, the most that a choice lost).

    Errors are distances to the float32 logits, losses are in standard deviations of these. `dropped`: of each row.
    """
    tokens = prompts(load_config(path).vocab_size)[2]
    runner, sequence = Runner(path, dtype), Sequence_(tokens)
    runner.step([(sequence, PREFIX)])
    chunk = runner.step([(sequence, CHUNK)], dropped=dropped)
    left = len(tokens) - PREFIX - CHUNK
    steps = torch.cat([runner.step([(sequence, 1)], dropped=dropped) for _ in range(left)])
    every, theirs_of_all = (
        reference(path, each)(torch.tensor([tokens])).logits[0].float() for each in (torch.float32, dtype)
    )
    found = []
    for ours, begin in ((chunk, PREFIX), (steps, PREFIX + CHUNK)):
        exact, theirs = (each[begin : begin + len(ours)] for each in (every, theirs_of_all))
        lost = exact.amax(-1) - exact.gather(1, ours.argmax(-1)[:, None])[:, 0]
        error = (ours - exact).abs().mean() / (theirs - exact).abs().mean()
        found.append((float(error), float(lost.max() / every.std())))
    return found


@pytest.mark.parametrize("dtype", LOST)
@pytest.mark.parametrize("shape", SHAPES)
def test_low_precision_teacher_forced(shape: str, dtype: torch.dtype, checkpoint: Callable[[str], Path]) -> None:
    """Logits are at most 1.5 times as far from the float32 ones as transformers' own, choices near the best."""
    for error, lost in teacher_forced(checkpoint(shape), dtype, dropped=0):
        assert error <= FURTHER
        assert lost <= LOST[dtype]


@pytest.mark.parametrize("dtype", LOST)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dropped_last_key_is_found(shape: str, dtype: torch.dtype, checkpoint: Callable[[str], Path]) -> None:
    """By that tolerance and with room, in the chunk and in the decode steps alike; of up to 75 keys one is left out."""
    for error, _ in teacher_forced(checkpoint(shape), dtype, dropped=1):
        assert error > 2 * FURTHER
