"""GGUF files: weights, configuration and tokenizer are those that transformers' own GGUF loading gives."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from benchmarks.peers.gguf_files import rewrite_gguf, write_gguf
from moonpool.base.checkpoint import (
    DefaultSampling,
    Tokenizer,
    inspect_checkpoint,
    load_config,
    model_name,
    resolve,
    weights_fingerprint,
)
from moonpool.base.checkpoint.formats import tensor_index, weight_files
from moonpool.base.checkpoint.weight_formats import GGUF_TYPES
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.weights import AttentionWeights
from tests.examples import each
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.gguf_files import SHAPES, make_folder

PROMPT = [5 + 7 * i % 500 for i in range(75)]
TEXTS = (
    "Where is the nearest town? It's 1234 km, and 56.7 more;  you'll see.\n\n\tYes\r\n  ",
    "é漢字 🎉 ﬁ \u00a0x",
    "<s>[user] tell <pad>me</s>",
    "",
)
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "bfloat16"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from an architecture to a Hugging Face folder of it."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_folder(architecture, tmp_path_factory.mktemp(architecture) / "model")
        return made[architecture]

    return make


@torch.inference_mode()
def reference_logits(folder: Path, tokens: Sequence[int], file: str | None = None) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    )
    model.train(False)
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


@torch.inference_mode()
def our_logits(path: Path, tokens: Sequence[int]) -> torch.Tensor:
    return Runner(path, torch.float32, borders=(1,)).step([(Sequence_(list(tokens)), len(tokens))])


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*each(SHAPES, ("F32", "F16", "Q8_0", "Q4_0", "Q4_K")), ("llama", "BF16"), ("llama", "Q4_1")],
)
def test_logits_are_those_of_transformers(
    architecture: str, kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_gguf(architecture, folders(architecture), tmp_path / "model.gguf", kind)
    config = load_config(file)
    assert config.dtype == DTYPES.get(kind, "bfloat16")
    assert config.tie_word_embeddings == (architecture != "llama")
    theirs = reference_logits(tmp_path, PROMPT, "model.gguf")
    assert float(theirs.std()) > 0.1
    assert_close(our_logits(file, PROMPT), theirs)
    if kind == "F32":
        assert_close(our_logits(file, PROMPT), reference_logits(folders(architecture), PROMPT))


@pytest.mark.parametrize(("architecture", "pre"), [("llama", "gpt-2"), ("llama", "llama-bpe"), ("qwen2", "qwen2")])
def test_the_tokenizer_is_that_of_transformers(
    architecture: str, pre: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_gguf(architecture, folders(architecture), tmp_path / "model.gguf", pre=pre)
    ours = Tokenizer.load(file)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So?"}]
    assert ours.render_chat(turns).text == theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert ours.vocab_size == 512


def test_a_stage_reads_what_its_folder_has(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Llama's rows of q and k come back in their places, biases too; a file has what its folder has."""
    folder = make_folder("llama", tmp_path / "folder", attention_bias=True)
    file = write_gguf("llama", folder, tmp_path / "model.gguf")
    ours, theirs = load_config(file), load_config(folder)
    eps = [part.decoder.final_norm.eps for part in (ours, theirs)]
    assert eps[0] == pytest.approx(eps[1], rel=1e-6)
    norm = ours.decoder.final_norm
    decoder = replace(theirs.decoder, final_norm=norm).each(lambda _, layer: replace(layer, norm=norm))
    assert ours == replace(theirs, decoder=decoder, default_sampling=ours.default_sampling)
    stages = [load_stage(path, load_config(path), torch.float32, 0, 2) for path in (file, folder)]
    for mine, expected in zip(*(stage.layers for stage in stages), strict=True):
        assert torch.equal(mine.attention.qkv.dense(), expected.attention.qkv.dense())
        assert torch.equal(mine.feed_forward.down.dense(), expected.feed_forward.down.dense())
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    projected = [stage.layers[1].attention for stage in stages]
    assert all(isinstance(part, AttentionWeights) for part in projected)
    assert torch.equal(*(part.qkv(x) for part in projected if isinstance(part, AttentionWeights)))
    assert inspect_checkpoint(file).parameters == inspect_checkpoint(folder).parameters
    assert len({weights_fingerprint(file), weights_fingerprint(folder)}) == 2


def test_a_file_that_is_rewritten_has_the_same_weights(folders: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf("llama", folders("llama"), tmp_path / "model.gguf", "Q8_0", metadata={"general.file_type": 7})
    other = rewrite_gguf(file, tmp_path / "other.gguf", "F32", metadata={"general.file_type": 0})
    assert load_config(other) == replace(load_config(file), dtype="float32")
    assert torch.equal(our_logits(other, PROMPT), our_logits(file, PROMPT))
    assert Tokenizer.load(other).encode(TEXTS[0]) == Tokenizer.load(file).encode(TEXTS[0])


def test_rope_divisors_are_llama_3s_scaling(tmp_path: Path) -> None:
    """Llama 3's converter writes one divisor per frequency; logits are those of the scaling in `config.json`."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 32}
    plain = make_folder("llama", tmp_path / "plain")
    scaled = make_folder("llama", tmp_path / "scaled", rope_scaling=scaling)
    frequencies = 1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((32 / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    divisors = (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)
    assert len(set(divisors.tolist())) > 3
    file = write_gguf("llama", plain, tmp_path / "model.gguf", extra={"rope_freqs.weight": divisors})
    assert_close(our_logits(file, PROMPT), our_logits(scaled, PROMPT))


def test_every_readable_type_is_the_packages() -> None:
    for number, kind in GGUF_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, gguf.GGML_QUANT_SIZES[theirs]) == (kind.name, (kind.elements, kind.bytes))
        row = np.zeros((1, kind.bytes), dtype=np.uint8)
        assert gguf.dequantize(row, theirs).shape == (1, kind.elements)


ODD: dict[str, dict[str, Any]] = {
    "sizes of 64 bits": {"llama.block_count": np.uint64(2), "llama.embedding_length": np.int64(256)},
    "sizes of 8 and 16 bits": {"llama.block_count": np.uint8(2), "llama.attention.head_count_kv": np.int16(2)},
    "numbers of 64 bits": {
        "llama.rope.freq_base": np.float64(10000.0),
        "llama.attention.layer_norm_rms_epsilon": np.float64(np.float32(1e-6)),
    },
    "a number that is whole": {"llama.rope.freq_base": 10000},
    "signed ids": {"tokenizer.ggml.eos_token_id": np.int32(1), "tokenizer.ggml.bos_token_id": np.int64(0)},
    "no token as -1": {"tokenizer.ggml.eot_token_id": np.int32(-1), "tokenizer.ggml.eom_token_id": 2**32 - 1},
    "heads by layer": {"llama.attention.head_count_kv": [2, 2]},
    "a scaling of none": {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 0.0},
    "words about the file": {
        "general.quantization_version": 2, "general.license": "x", "general.tags": ["a", "b"], "llama.vocab_size": 512
    },
    "expert keys of 0": {"llama.expert_count": 0, "llama.expert_used_count": 0},
}  # fmt: skip
"""Metadata of other types, or that says nothing new."""


@pytest.mark.parametrize("name", ODD)
def test_metadata_of_odd_kinds_mean_the_same(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    plain = write_gguf("llama", folders("llama"), tmp_path / "plain.gguf")
    odd = write_gguf("llama", folders("llama"), tmp_path / "odd.gguf", metadata=ODD[name])
    assert load_config(odd) == load_config(plain)
    assert Tokenizer.load(odd).encode("so <s> the") == Tokenizer.load(plain).encode("so <s> the")


def test_an_answer_ends_with_every_end_token_of_a_file(folders: Callable[[str], Path], tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": np.int32(8)}
    file = write_gguf("llama", folders("llama"), tmp_path / "model.gguf", metadata=metadata)
    assert load_config(file).eos_token_ids == (1, 7, 8)


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({"tokenizer.ggml.eos_token_id": "1"}, "tokenizer.ggml.eos_token_id"),
        ({"llama.block_count": "4"}, "llama.block_count"),
        ({"llama.block_count": np.int32(-4)}, "llama.block_count"),
        ({"llama.rope.freq_base": "x"}, "llama.rope.freq_base"),
        ({"llama.attention.head_count": True}, "llama.attention.head_count"),
    ],
)
def test_metadata_of_wrong_kinds_is_named(
    metadata: dict[str, Any], key: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_gguf("llama", folders("llama"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=re.escape(key)):
        load_config(file)


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"general.architecture": "mamba"}, "general.architecture"),
        ({"llama.logit_scale": 8.0}, "llama.logit_scale"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length"),
        ({"llama.attention.sliding_window": 32}, "llama.attention.sliding_window"),
    ],
)
def test_what_is_not_supported_is_named(
    metadata: dict[str, Any], field: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_gguf("llama", folders("llama"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModel) as caught:
        load_config(file)
    assert caught.value.field == field


def test_a_tensor_without_a_place_is_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.scale": np.ones(1, dtype=np.float32)}
    file = write_gguf("llama", folders("llama"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.scale: this tensor has no place"):
        load_stage(file, load_config(file), torch.float32, 0, 2)
    file = write_gguf("llama", folders("llama"), tmp_path / "less.gguf", leave_out=["blk.1.ffn_up.weight"])
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_stage(file, load_config(file), torch.float32, 0, 2)


def test_damaged_files_are_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    whole = write_gguf("llama", folders("llama"), tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "model.gguf"
    for content in (b"", b"GGUX", whole[:20], whole[:3000], whole[:-200], b"\0" * 100):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.gguf: not a whole GGUF file"):
            load_config(file)
    file.write_bytes(whole[:4] + b"\x01\0\0\0" + whole[8:])
    with pytest.raises(UnsupportedModel, match=r"GGUF\.version"):
        load_config(file)
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        load_config(tmp_path / "nowhere.gguf")


def test_the_file_suggests_a_sampling(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """By llama.cpp's keys; else the card of the model whose name the file has."""
    suggested = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    file = write_gguf("llama", folders("llama"), tmp_path / "SmolLM2-135M-Instruct.gguf", "F32", metadata=suggested)
    assert load_config(file).default_sampling == DefaultSampling(temperature=0.5, top_k=20)
    plain = write_gguf("llama", folders("llama"), tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", "F32")
    assert load_config(plain).default_sampling == DefaultSampling(temperature=0.2, top_p=0.9)


def test_a_folder_with_one_file_stands_for_it(folders: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf("llama", folders("llama"), tmp_path / "model.gguf")
    assert resolve(str(tmp_path)) == resolve(str(file)) == file
    (tmp_path / "other.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has 2 \.gguf files; name one, for example model\.gguf"):
        resolve(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: no folder or file here"):
        resolve("nowhere.gguf")


def test_parts_are_one_model(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As the package splits them: the same tensors, and logits; the folder stands for its parts."""
    folder = folders("qwen2")
    whole = write_gguf("qwen2", folder, tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    first = write_gguf("qwen2", folder, tmp_path / "parts" / "big.gguf", part_tensors=7)
    files = sorted((tmp_path / "parts").iterdir())
    assert first == files[0]
    assert first.name == f"big-00001-of-{len(files):05}.gguf"
    assert len(files) > 2
    assert weight_files(first) == files
    assert tensor_index(first).keys() == tensor_index(whole).keys()
    assert {info.file for info in tensor_index(first).values()} == set(files)
    assert (resolve(str(tmp_path / "parts")), model_name(str(first))) == (first, "big")
    assert torch.equal(our_logits(first, range(20)), our_logits(whole, range(20)))

    with pytest.raises(CheckpointError, match=r"is part 2 of a model; name the first, big-00001-of"):
        tensor_index(files[1])
    files[1].rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"big-00002-of-0000\d\.gguf is missing"):
        tensor_index(first)
    first.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="is one of 4 parts, which its name does not say"):
        tensor_index(tmp_path / "alone.gguf")
