"""LoRA adapters on a stage: rows of several adapters in one batch equal each alone, and PEFT's own models."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.quantization import Quantization
from moonpool.engine.models.batch import BatchLoras, PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.lora import StageLora, load_lora
from moonpool.engine.models.random_checkpoint import create, create_lora
from moonpool.engine.models.stage import StageModel
from moonpool.engine.models.tensor_reader import KeptWeights
from tests.unit.engine.models.test_families import CASES
from tests.unit.engine.models.test_families import reference as tiny
from tests.unit.engine.models.test_native_step import kernels
from tests.unit.engine.models.test_parity import assert_greedy, prompts, reference

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by PEFT
BLOCK, MAX_RANK, NEW = 16, 16, 8


def load_into(stage: StageModel, folder: Path, lora: bytes, max_rank: int = MAX_RANK) -> StageLora:
    """A stage's part of an adapter."""
    return load_lora(folder, lora, stage.config, stage.layers, stage.layer_begin, max_rank=max_rank)


class Served:
    """A model in one or more stages, each with the same adapters, by name."""

    def __init__(
        self,
        path: Path,
        folders: Mapping[str, Path],
        dtype: torch.dtype = torch.float32,
        *,
        borders: Sequence[int] = (),
        quantization: Quantization = "auto",
        deterministic: bool = False,
    ) -> None:
        self.config, self.dtype = load_config(path), dtype
        self.stages: list[StageModel] = [
            load_stage(path, self.config, dtype, *ends, kept=KeptWeights(quantization), deterministic=deterministic)
            for ends in pairwise([0, *borders, self.config.num_layers])
        ]
        self.loras: list[dict[str, StageLora]] = [
            {name: load_into(stage, folder, read_adapter(folder).id, MAX_RANK) for name, folder in folders.items()}
            for stage in self.stages
        ]

    def greedy(
        self, texts: Sequence[Sequence[int]], names: Sequence[str], new: int = NEW
    ) -> tuple[list[list[int]], list[list[Tensor]]]:
        """Greedy tokens of all prompts in one batch, each with the adapter of this name ("" = none), and the logits.

        Prompts go in two steps: some tokens first, of a number that differs, then the others.
        """
        layout = kv_layout(self.config, "float32", BLOCK)
        each = -(-(max(map(len, texts)) + new) // BLOCK)
        pools = []
        for layer in range(layout.layers):
            group = layout.group(layer)
            shape = (each * len(texts), group.kv_heads, group.planes, group.slots(BLOCK), group.head_dim)
            pools.append(torch.zeros(shape, dtype=torch.float32 if group.kind == "recurrent" else self.dtype))
        alike = len({pool.shape for pool in pools}) == 1
        pool = torch.stack(pools) if alike else pools
        tables = [list(range(i * each, (i + 1) * each)) for i in range(len(texts))]
        tokens, done = [list(text) for text in texts], [0] * len(texts)
        logits: list[list[Tensor]] = [[] for _ in texts]
        for step in range(new + 1):
            parts = []
            for i, sequence in enumerate(tokens):
                count = len(sequence) // 2 if step == 0 else len(sequence) - done[i]
                parts.append((array("i", sequence[done[i] : done[i] + count]).tobytes(), done[i], tables[i]))
                done[i] += count
            found = self._step(parts, names, pool)
            for i, rows in enumerate(torch.split(found, [len(part[0]) // 4 for part in parts])) if step else ():
                logits[i].append(rows[-1])
                tokens[i].append(int(rows[-1].argmax()))
        return [sequence[len(text) :] for sequence, text in zip(tokens, texts, strict=True)], logits

    def _step(self, parts: Sequence[tuple[bytes, int, list[int]]], names: Sequence[str], pool: Any) -> Tensor:
        batch = PackedBatch.build(parts, BLOCK)
        hidden = batch.token_ids
        for stage, loras in zip(self.stages, self.loras, strict=True):
            of = [loras[name] if name else None for name in names]
            batch.loras = BatchLoras(of, batch.query_start.tolist(), "cpu") if any(of) else None
            hidden = stage.forward(hidden, batch, pool[stage.layer_begin : stage.layer_end])
        return self.stages[-1].logits(hidden)


def assert_rows_alone(served: Served, names: Sequence[str]) -> None:
    """Each sequence's logits are, bit for bit, those of a batch of its own; adapters change tokens."""
    texts = prompts(served.config.vocab_size)[: len(names)]
    together, logits = served.greedy(texts, names)
    for i, name in enumerate(names):
        alone, rows = served.greedy(texts[i : i + 1], [name])
        assert alone == together[i : i + 1]
        for own, other in zip(rows[0], logits[i], strict=True):
            torch.testing.assert_close(other, own, rtol=0, atol=0)
    plain, _ = served.greedy(texts, [""] * len(names))
    assert [mine == base for mine, base in zip(together, plain, strict=True)] == [not name for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_rows_in_a_mixed_batch_are_those_alone(
    shape: str, dtype: torch.dtype, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two adapters of different ranks and places, and two sequences without one, of which native steps compute one."""
    path = checkpoint(shape)
    config = load_config(path)
    folders = {
        "all": create_lora(tmp_path / "all", config, 1),
        "some": create_lora(tmp_path / "some", config, 2, ("q", "v", "up"), rank=3),
    }
    served = Served(path, folders, dtype)
    stage, both = served.stages[0], list(served.loras[0].values())
    assert stage.progress(BatchLoras([*both, None], range(4), "cpu")) is not None  # in the native call
    assert_rows_alone(served, ["all", "", "some", ""])
    assert_rows_alone(served, ["some", "all"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_layer_of_some_rows_alone(
    dtype: torch.dtype, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each row keeps its own adapter where the others are left out."""
    path = checkpoint("tiny-llama")
    config = load_config(path)
    folders = {"a": create_lora(tmp_path / "a", config, 1), "b": create_lora(tmp_path / "b", config, 2, rank=3)}
    served = Served(path, folders, dtype)
    stage, (a, b) = served.stages[0], served.loras[0].values()
    texts = prompts(config.vocab_size)[:4]
    ends = [0, *accumulate(map(len, texts))]
    found = []
    some = [2, 3, 2, 0]  # a single row would be attended in another way
    for last_rows in (None, some):
        pool = torch.zeros(config.num_layers, 64, config.num_kv_heads, 2, BLOCK, config.head_dim, dtype=dtype)
        parts = [(array("i", text).tobytes(), 0, list(range(16 * i, 16 * i + 16))) for i, text in enumerate(texts)]
        batch = PackedBatch.build(parts, BLOCK)
        batch.loras = BatchLoras([a, None, b, a], ends, "cpu")
        hidden = stage.embed(batch.token_ids)
        found.append(stage.run(hidden, batch, pool, 0, config.num_layers, last_rows=last_rows)[1])
    rows = [row for end, count in zip(ends[1:], some, strict=True) for row in range(end - count, end)]
    assert torch.equal(found[0][rows], found[1][rows])


def test_rows_are_those_alone_in_deterministic_mode_without_native_kernels(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = checkpoint("tiny-llama")
    config = load_config(path)
    folders = {"a": create_lora(tmp_path / "a", config, 1), "b": create_lora(tmp_path / "b", config, 2, rank=16)}
    with kernels("torch"):
        assert_rows_alone(Served(path, folders, deterministic=True), ["a", "", "b"])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_base_may_be_packed(quantization: Quantization, tmp_path: Path) -> None:
    path = create("tiny-llama", tmp_path / "model", 7, "float32")
    config = load_config(path)
    folders = {"a": create_lora(tmp_path / "a", config, 1), "b": create_lora(tmp_path / "b", config, 2)}
    assert_rows_alone(Served(path, folders, quantization=quantization), ["a", "", "b"])


def peft_adapter(path: Path, folder: Path, seed: int, **settings: Any) -> Path:
    """An adapter that PEFT itself writes, with matrices that are not zero."""
    import peft  # takes seconds, and only one of several processes runs these tests

    model = peft.get_peft_model(reference(path, torch.float32), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.save_pretrained(str(folder))
    return folder


def assert_peft(path: Path, served: Served, folders: Mapping[str, Path]) -> None:
    """All adapters in one batch, and a prompt without one: each answer is that of PEFT's model, token for token."""
    import peft

    names = [*folders, ""]
    texts = prompts(served.config.vocab_size)[: len(names)]
    found, _ = served.greedy(texts, names)
    plain, _ = served.greedy(texts, [""] * len(names))
    for name, text, tokens, base in zip(names, texts, found, plain, strict=True):
        model: Any = reference(path, torch.float32)
        if name:
            model = peft.PeftModel.from_pretrained(model, folders[name])
            assert tokens != base
        assert_greedy(model, text, tokens)


@pytest.mark.parametrize("borders", [(), (1,)])
def test_answers_are_pefts(borders: Sequence[int], checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Ranks and alphas by pattern, rank-stabilised scales, some layers only; in one stage and in two."""
    path = checkpoint("tiny-llama")
    folders = {
        "patterns": peft_adapter(
            path, tmp_path / "a", 1, r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True,
            rank_pattern={"q_proj": 2, r"layers\.1\.mlp\..*": 7}, alpha_pattern={"down_proj": 3},
        ),
        "layers": peft_adapter(
            path, tmp_path / "b", 2, r=8, lora_alpha=16, target_modules=["k_proj", "o_proj", "gate_proj"],
            layers_to_transform=[0, 2],
        ),
    }  # fmt: skip
    assert_peft(path, Served(path, folders, borders=borders), folders)


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("gptj", ["q_proj", "k_proj", "fc_in"]),
        ("falcon, new", ["query_key_value", "dense_h_to_4h"]),
        ("glm4", ["q_proj", "k_proj", "gate_up_proj"]),
        ("gemma3", ["q_proj", "gate_proj", "down_proj"]),
        ("deepseek_v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]),
        ("qwen3_next", ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]),
        ("lfm2", ["in_proj", "out_proj", "w1"]),
        ("qwen3_moe", ["q_proj", "o_proj"]),
        ("qwen2_moe", ["v_proj", "shared_expert.up_proj", "shared_expert.down_proj"]),
    ],
)
def test_answers_are_pefts_in_other_families(case: str, targets: Sequence[str], tmp_path: Path) -> None:
    """Projections that are one tensor, transposed, by head or in another order of rows; recurrent and latent layers."""
    path = tmp_path / "model"
    tiny(*CASES[case]).save_pretrained(path)
    transposed = case == "gpt2"
    folder = peft_adapter(
        path, tmp_path / "lora", 3, r=4, lora_alpha=8, target_modules=list(targets), fan_in_fan_out=transposed
    )
    assert_peft(path, Served(path, {"a": folder}), {"a": folder})


def test_a_changed_folder_is_not_the_adapter(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("tiny-llama")
    config = load_config(path)
    stage = load_stage(path, config, torch.float32, 0, 1)
    folder = create_lora(tmp_path / "a", config, 1)
    wanted = read_adapter(folder).id
    create_lora(folder, config, 2)
    with pytest.raises(CheckpointError, match="have changed since the adapter was loaded"):
        load_into(stage, folder, wanted, MAX_RANK)
    with pytest.raises(UnsupportedModel, match="rank 8, the setting allows 7"):
        load_into(stage, folder, read_adapter(folder).id, 7)


def rename(folder: Path, old: str, new: str) -> None:
    """Give a module of an adapter another name."""
    file = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.9.self_attn.q_proj", "model.layers.9.self_attn.q_proj"),
        ("model.layers.3.mlp.up_proj", "lm_head", "lm_head"),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate"),
    ],
)
def test_modules_without_additions_are_refused_by_name(
    old: str, new: str, named: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """By each stage, also by one without the layer."""
    path = checkpoint("tiny-llama")
    config = load_config(path)
    stage = load_stage(path, config, torch.float32, 1, 2)
    folder = create_lora(tmp_path / "a", config, 1)
    rename(folder, old, new)
    with pytest.raises(UnsupportedModel, match="takes no LoRA adapter") as refused:
        load_into(stage, folder, read_adapter(folder).id, MAX_RANK)
    assert refused.value.field == named


def test_experts_take_no_adapter(tmp_path: Path) -> None:
    path = tmp_path / "model"
    tiny(*CASES["qwen3_moe"]).save_pretrained(path)
    config = load_config(path)
    stage = load_stage(path, config, torch.float32, 0, config.num_layers)
    folder = create_lora(tmp_path / "a", config, 1, ("q", "expert0.up"))
    with pytest.raises(UnsupportedModel, match="outside experts") as refused:
        load_into(stage, folder, read_adapter(folder).id, MAX_RANK)
    assert refused.value.field == "model.layers.0.mlp.experts.0.up_proj"


def test_an_adapter_of_another_shape(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    other = create("tiny-llama", tmp_path / "other", 1, "float32", overrides={"intermediate_size": 96})
    folder = create_lora(tmp_path / "a", load_config(other), 1)
    path = checkpoint("tiny-llama")
    config = load_config(path)
    stage = load_stage(path, config, torch.float32, 0, 1)
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.gate_proj has shape \[96, .* in the adapter"):
        load_into(stage, folder, read_adapter(folder).id, MAX_RANK)


def test_models_of_transformers_own_code_take_none(tmp_path: Path) -> None:
    tiny("apertus", {"head_dim": 16, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    stage = load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 1)
    with pytest.raises(UnsupportedModel, match="transformers' own code computes") as refused:
        load_into(stage, tmp_path, b"", MAX_RANK)
    assert refused.value.field == "lora"
