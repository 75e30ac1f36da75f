"""Stages with packed weights beside a plain forward pass of the same numbers; their memory; what is not packed."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moonpool.base.checkpoint import load_config
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.tensor_reader import KeptWeights
from tests.examples import pairs
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.packed_reference import GAP, pack

NEW = 6


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in (3, 17, 70)]


@functools.cache
def reference(path: Path, quantization: str) -> Any:
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    plain.train(False)
    return pack(plain, quantization)


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    with torch.inference_mode():
        rows = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert float((rows.amax(1) - chosen).max()) <= GAP


@pytest.mark.parametrize(
    ("quantization", "shape", "mode"),
    pairs(["int8", "int4"], ["tiny-llama", "tiny-qwen2"], ["", "torch"]),
)
def test_greedy_whole_in_chunks_and_in_stages(
    quantization: Any, shape: str, mode: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tiny-qwen2 has a tied head, which is the first stage's embedding."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    path = checkpoint(shape)
    texts, plain = prompts(load_config(path).vocab_size), reference(path, quantization)
    for borders, chunk, budget in ((), 1000, 1000), ((1,), 16, 40):
        if mode and not borders:
            continue  # chunks in two stages take the same products
        runner = Runner(path, torch.float32, borders, quantization=quantization)
        for prompt, output in zip(texts, runner.generate(texts, NEW, chunk=chunk, budget=budget), strict=True):
            assert_greedy(plain, prompt, output)
        assert all(stage.native for stage in runner.stages) == (not mode)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@torch.inference_mode()
def test_logits_are_those_of_the_dequantised_weights(quantization: Any, checkpoint: Callable[[str], Path]) -> None:
    """Rows of which no number is rounded to another byte are the same; none is near that of the dense weights."""
    path = checkpoint("tiny-llama")
    tokens = prompts(load_config(path).vocab_size)[2]
    want = reference(path, quantization)(torch.tensor([tokens])).logits[0]
    packed, dense = (
        Runner(path, torch.float32, quantization=each).step([(Sequence_(tokens), len(tokens))])
        for each in (quantization, "none")
    )
    own, other = ((logits - want).square().mean(1).sqrt() / want.std() for logits in (packed, dense))
    assert float(own.sort().values[len(own) // 10]) < 1e-5
    assert float(own.max()) < 0.1
    assert float(other.min()) > 0.01


def test_weights_take_the_bytes_that_their_bits_say(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("tiny-llama")
    config = load_config(path)

    def layer_bytes(quantization: Any) -> int:
        stage = load_stage(path, config, torch.bfloat16, 0, config.num_layers, kept=KeptWeights(quantization))
        return sum(layer.nbytes for layer in stage.layers)

    dense, eight, four = map(layer_bytes, ("none", "int8", "int4"))
    assert layer_bytes("auto") == layer_bytes("file") == dense  # there are no codes
    # 8.5 and 5 bits of 16; norms stay, and panels are filled up to 32 outputs.
    assert eight == pytest.approx(dense * 8.5 / 16, rel=0.06)
    assert four == pytest.approx(dense * 5 / 16, rel=0.06)


def test_inputs_that_no_chunk_fits_stay_dense(tmp_path: Path) -> None:
    path = create("tiny-llama", tmp_path / "model", 3, "float32", overrides={"intermediate_size": 40})
    config = load_config(path)
    stage = load_stage(path, config, torch.float32, 0, 1, kept=KeptWeights("int4"))
    feed_forward: Any = stage.layers[0].feed_forward
    elements = feed_forward.down.shape.numel()
    assert feed_forward.down.nbytes == 4 * elements
    assert feed_forward.gate_up.nbytes < feed_forward.gate_up.shape.numel()


def test_experts_are_packed_and_the_router_is_not(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("tiny-mixtral")
    texts = prompts(load_config(path).vocab_size)[:1]
    runner = Runner(path, torch.float32, quantization="int8")
    experts: Any = runner.stages[0].layers[0].feed_forward
    assert experts.router.nbytes == 4 * experts.router.shape.numel()
    assert all(expert.down.nbytes < 2 * expert.down.shape.numel() for expert in experts.experts)
    dense = Runner(path, torch.float32)
    [tokens] = texts
    packed, plain = (each.step([(Sequence_(tokens), len(tokens))]) for each in (runner, dense))
    torch.testing.assert_close(packed, plain, rtol=0, atol=0.1 * float(plain.abs().max()))
