"""Loading stages: what is read, what is refused, and random checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.base.checkpoint import Tokenizer, inspect_checkpoint, load_config, weights_fingerprint
from moonpool.base.errors import CheckpointError, ConfigError, UnsupportedModel
from moonpool.base.quantization import Quantization
from moonpool.engine.models.loader import load_stage, torch_dtype
from moonpool.engine.models.random_checkpoint import SHAPES, create
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.weights.linear import Linear


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return create("tiny-llama", tmp_path / "model", dtype="float32", overrides={"num_hidden_layers": 2})


def change(folder: Path, **tensors: Any) -> None:
    file = folder / "model.safetensors"
    kept = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


def load(folder: Path, begin: int = 0, end: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    return load_stage(folder, load_config(folder), dtype, begin, end)


def test_stages_have_their_share(folder: Path) -> None:
    first, last = load(folder, 0, 1), load(folder, 1, 2)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert first.head is None
    assert first.final_norm is None
    assert last.embedding is None
    assert last.head.shape == (512, 64)
    whole = load(folder)
    assert whole.weight_bytes == first.weight_bytes + last.weight_bytes == inspect_checkpoint(folder).weight_bytes
    stored = load_file(folder / "model.safetensors")
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(last.layers[0].attention.qkv.dense(), torch.cat([stored[name] for name in names]))


@pytest.mark.parametrize("mode", ["", "torch"])
def test_a_tied_head_is_the_embedding(
    mode: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    path = checkpoint("tiny-qwen2")
    model = load_stage(path, load_config(path), torch.float32, 0, 4)
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert model.head is not None
    assert torch.equal(model.head.dense(), stored)
    assert torch.equal(model.embed(torch.arange(512)), stored)
    twice = isinstance(model.embedding, torch.Tensor)
    assert twice == (model.head.panels is None)  # what native kernels arrange gives rows back, and is held once
    assert model.weight_bytes == inspect_checkpoint(path).weight_bytes + (stored.nbytes if twice else 0)
    last = load_stage(path, load_config(path), torch.float32, 3, 4)
    assert last.embedding is None
    assert last.head is not None
    assert torch.equal(last.head.dense(), stored)


def test_a_stage_does_not_need_the_others_tensors(folder: Path) -> None:
    change(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    load(folder, 0, 1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(folder, 1, 2)


@pytest.mark.parametrize(
    ("words", "tensor"),
    [
        (r"has shape \[64\], the configuration makes it \[64, 64\]", torch.zeros(64)),
        ("is stored as F64", torch.zeros(64, 64, dtype=torch.float64)),
        ("is stored as I8", torch.zeros(64, 64, dtype=torch.int8)),
    ],
)
def test_wrong_tensors_are_named(words: str, tensor: torch.Tensor, folder: Path) -> None:
    change(folder, **{"model.layers.1.self_attn.o_proj.weight": tensor})
    with pytest.raises(CheckpointError, match=rf"model\.layers\.1\.self_attn\.o_proj\.weight {words}"):
        load(folder)


def test_weights_are_converted(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    model = load(folder, dtype=torch_dtype("bfloat16"))
    assert torch.equal(model.layers[0].feed_forward.down.dense(), stored.bfloat16())
    with pytest.raises(UnsupportedModel, match="int8"):
        torch_dtype("int8")


def test_created_checkpoints_are_functions_of_the_seed(folder: Path, tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 2}
    again = create("tiny-llama", tmp_path / "again", dtype="float32", overrides=overrides)
    other = create("tiny-llama", tmp_path / "other", 1, dtype="float32", overrides=overrides)
    cut = create("tiny-llama", tmp_path / "cut", dtype="float32", overrides=overrides, shard_bytes=100_000)
    assert weights_fingerprint(again) == weights_fingerprint(folder) != weights_fingerprint(other)
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert torch.equal(
        load(cut).layers[1].feed_forward.gate_up.dense(), load(folder).layers[1].feed_forward.gate_up.dense()
    )


def test_created_tokenizers_give_text_for_every_token(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == 512
    text = "Where is the nearest town? é 漢字 🎉\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < len(text.encode())
    assert all(tokenizer.decode([token]) for token in range(3, 512))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(rendered, skip_special=False) == "<s>[user] hi\n[assistant] "


def test_create_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for field, arguments in (
        ("name", ("gpt-5", tmp_path / "a")),
        ("path", ("tiny-llama", tmp_path)),
    ):
        with pytest.raises(ConfigError) as caught:
            create(*arguments)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="vocab_size"):
        create("tiny-llama", tmp_path / "b", overrides={"vocab_size": 100})


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_configuration(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(SHAPES[name])))
    config = load_config(tmp_path)
    assert config.num_heads % config.num_kv_heads == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("mode", ["", "torch"])
def test_arranged_weights_compute_the_same(
    rows: int, dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 48, generator=generator).to(dtype) for n in (80, rows))
    bias = torch.randn(80, generator=generator).to(dtype)
    expected = torch.nn.functional.linear(x, weight, bias)
    linear = Linear(weight, bias)
    assert (linear.shape, linear.nbytes) == (weight.shape, weight.nbytes + bias.nbytes)
    assert torch.equal(linear.dense(), weight)
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (2e-2, 4e-2)
    torch.testing.assert_close(linear(x), expected, rtol=rtol, atol=atol)
    assert torch.equal(linear(x, wide=True), linear(x).float())
    torch.testing.assert_close(Linear(weight)(x), torch.nn.functional.linear(x, weight), rtol=rtol, atol=atol)
    gates, ups = expected.chunk(2, dim=-1)
    gated = Linear(weight, bias, gated=True)(x)
    torch.testing.assert_close(gated, torch.nn.functional.silu(gates) * ups, rtol=4e-2, atol=20 * atol)


def test_created_files_are_for_every_user(tmp_path: Path) -> None:
    """A service that runs as another user can read the weights as well as the rest."""
    folder = create("tiny-llama", tmp_path / "shared", dtype="float32", overrides={"num_hidden_layers": 1})
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("quantization", ["int8", "int4", "auto"])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gemma3", "tiny-deepseek-v3", "tiny-qwen3-next"])
def test_weights_take_the_memory_that_was_told(shape: str, quantization: Quantization, tmp_path: Path) -> None:
    """Within a tenth: small parts, as norms' and routers', are not told apart to the byte."""
    create(shape, tmp_path / "model", seed=1, dtype="bfloat16")
    config = load_config(tmp_path / "model")
    told = inspect_checkpoint(tmp_path / "model", quantization=quantization).weight_bytes
    stage = load_stage(tmp_path / "model", config, torch.bfloat16, 0, config.num_layers, kept=KeptWeights(quantization))
    assert stage.weight_bytes == pytest.approx(told, rel=0.1)
