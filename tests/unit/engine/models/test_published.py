"""What starts as published: folders and GGUF files in the shape of models that people run, made tiny.

Each is inspected and loaded as published, answers as transformers does, and answers a second turn behind the blocks of
the first. A few rows run each time, all of them among the slow tests. docs/models.md lists the rows.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moonpool.base.checkpoint import inspect_checkpoint
from tests.unit.engine.models.forward import BLOCK, Runner
from tests.unit.engine.models.test_families import CASES, ONE_STAGE, reference
from tests.unit.engine.models.test_gguf_families import CHANGED, FILES, write
from tests.unit.engine.models.test_parity import assert_greedy
from tests.unit.engine.models.test_wrapped import WHOLE, save_as_published, whole_model

Fields = dict[str, Any]
DOCS = Path(__file__).parents[4] / "docs" / "models.md"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PATTERN = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def nemotron(fields: Fields) -> None:
    """Layers by letters, and their number, as in NVIDIA's folders."""
    kinds = fields.pop("layers_block_type")
    fields |= {"hybrid_override_pattern": "".join(PATTERN[kind] for kind in kinds), "num_hidden_layers": len(kinds)}


def mimo(fields: Fields) -> None:
    """Xiaomi's own words for kinds of layers, windows and RoPE."""
    fields["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in fields.pop("layer_types")]
    fields["moe_layer_freq"] = [int(kind == "sparse") for kind in fields.pop("mlp_layer_types")]
    fields["sliding_window_size"] = fields["sliding_window"] - 1
    kinds = fields.pop("rope_parameters")
    fields |= {
        "rope_theta": kinds["full_attention"]["rope_theta"],
        "swa_rope_theta": kinds["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": 0.334,
        "swa_num_key_value_heads": 2 * fields["num_key_value_heads"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "routed_scaling_factor": None,
        "topk_method": "noaux_tc",
    }


def named(model_type: str) -> Callable[[Fields], None]:
    """The published `model_type`, where transformers has another."""
    return lambda fields: fields.update(model_type=model_type)


#: Model: the published class, case of test_families, what the case changes, and what the published folder says else.
FOLDERS: Mapping[str, tuple[str, str, Mapping[str, Any], Callable[[Fields], None] | None]] = {
    "Llama 3": ("LlamaForCausalLM", "llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}, None),
    "Mistral 7B": ("MistralForCausalLM", "mistral", {}, None),
    "Mixtral": ("MixtralForCausalLM", "mixtral", {}, None),
    "Qwen 2.5": ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": False}, None),
    "Qwen 3": ("Qwen3ForCausalLM", "qwen3", {}, None),
    "Qwen 3, experts": ("Qwen3MoeForCausalLM", "qwen3_moe", {}, None),
    "Qwen3-Next": ("Qwen3NextForCausalLM", "qwen3_next", {"mlp_only_layers": [], "attention_bias": False}, None),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", {}, None),
    "DeepSeek V2": ("DeepseekV2ForCausalLM", "deepseek_v2", {}, None),
    "DeepSeek V3, R1": ("DeepseekV3ForCausalLM", "deepseek_v3, yarn", {}, None),
    "DeepSeek V3.2": ("DeepseekV32ForCausalLM", "deepseek_v32", {}, None),
    "Kimi K2": ("DeepseekV3ForCausalLM", "deepseek_v3", {}, named("kimi_k2")),
    "Kimi Linear": ("KimiLinearForCausalLM", "kimi_linear", {}, None),
    "GLM-4": ("Glm4ForCausalLM", "glm4", {}, None),
    "GLM-4.5, 4.6": ("Glm4MoeForCausalLM", "glm4_moe", {}, None),
    "GLM-5": ("GlmMoeDsaForCausalLM", "glm_moe_dsa", {}, None),
    "Gemma 2": ("Gemma2ForCausalLM", "gemma2", {}, None),
    "Gemma 3 (text)": ("Gemma3ForCausalLM", "gemma3", {}, None),
    "Phi 4": ("Phi3ForCausalLM", "phi3", {"sliding_window": None}, None),
    "Phi-4-mini": ("Phi3ForCausalLM", "phi3, longrope", {"tie_word_embeddings": True}, None),
    "SmolLM3": ("SmolLM3ForCausalLM", "smollm3", {}, None),
    "OLMo 2": ("Olmo2ForCausalLM", "olmo2", {}, None),
    "OLMo 3": ("Olmo3ForCausalLM", "olmo3, yarn", {}, None),
    "Granite 3": ("GraniteForCausalLM", "granite", {}, None),
    "Granite 4": ("GraniteMoeHybridForCausalLM", "granite, hybrid", {}, None),
    "Command R7B": ("Cohere2ForCausalLM", "cohere2", {}, None),
    "EXAONE 4": ("Exaone4ForCausalLM", "exaone4", {}, None),
    "K-EXAONE": ("ExaoneMoeForCausalLM", "exaone_moe", {}, None),
    "Seed-OSS": ("SeedOssForCausalLM", "seed_oss", {}, None),
    "ERNIE 4.5": ("Ernie4_5ForCausalLM", "ernie4_5", {}, None),
    "ERNIE 4.5, experts": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {}, None),
    "Hunyuan": ("HunYuanDenseV1ForCausalLM", "hunyuan", {}, None),
    "LFM2": ("Lfm2ForCausalLM", "lfm2", {}, None),
    "LFM2, experts": ("Lfm2MoeForCausalLM", "lfm2_moe", {}, None),
    "MiniMax M2": ("MiniMaxM2ForCausalLM", "minimax_m2", {}, None),
    "dots.llm1": ("Dots1ForCausalLM", "dots1", {}, None),
    "Nemotron Nano 2": ("NemotronHForCausalLM", "nemotron_h", {}, nemotron),
    "Nemotron 3 Nano": ("NemotronHForCausalLM", "nemotron_h, experts", {"n_group": 1, "topk_group": 1}, nemotron),
    "Nemotron 3 Super": ("NemotronHForCausalLM", "nemotron_h, latent experts", {}, nemotron),
    "Falcon-H1": ("FalconH1ForCausalLM", "falcon_h1", {}, None),
    "MiMo V2 Flash": ("MiMoV2FlashForCausalLM", "mimo_v2_flash", {}, mimo),
    "StarCoder2": ("Starcoder2ForCausalLM", "starcoder2", {}, None),
}
#: GGUF: case of test_gguf_families, by model.
GGUF: Mapping[str, str] = {
    "Qwen3.5, 3.6": "qwen35",
    "Qwen3.5, 3.6, experts": "qwen35moe",
    "Qwen3-Next": "qwen3next",
    "Qwen3-VL": "qwen3vl",
    "Qwen3-VL, experts": "qwen3vlmoe",
    "Qwen2-VL, Qwen2.5-VL": "qwen2vl",
    "Gemma 4": "gemma4",
    "Gemma 4 E2B, E4B": "gemma4, shared KV",
    "Gemma 4 26B": "gemma4, experts",
    "Gemma 4 31B": "gemma4, values of keys",
    "Llama 4": "llama4",
    "Granite 4": "granitehybrid",
    "LFM2, experts": "lfm2moe",
    "K-EXAONE": "exaone-moe",
    "Kimi Linear": "kimi-linear",
    "Jais 2": "jais2",
    "Phi 2": "phi2",
    "Falcon 7B": "falcon",
    "Falcon 40B, 180B": "falcon, new",
    "Falcon-H1": "falcon-h1",
    "GLM-5": "glm-dsa",
    "MiMo V2 Flash": "mimo2",
    "MiniCPM3": "minicpm3",
    "Pythia, GPT-NeoX": "gptneox",
    "GPT-2": "gpt2",
    "StarCoder": "starcoder",
    "Phi-4-mini": "phi3, longrope",
    "Nemotron Nano 2": "nemotron_h",
    "Nemotron 3 Nano": "nemotron_h_moe",
    "Nemotron 3 Super": "nemotron_h_moe, latent",
}
QUICK = ("Llama 3", "Nemotron 3 Nano", "MiMo V2 Flash", "Kimi K2")
QUICK_GGUF = ("Qwen3.5, 3.6", "Gemma 4 E2B, E4B")


def rows(names: Any, quick: tuple[str, ...]) -> list[Any]:
    """Parameters of which all but some are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def spelled_as_before(fields: Fields) -> None:
    """The spelling of folders that are older than transformers 5: RoPE and the element type."""
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        del fields["rope_parameters"]
        fields["rope_theta"] = rope.pop("rope_theta", 10000.0)
        if "partial_rotary_factor" in rope:
            fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        fields["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else {**rope}
    if "dtype" in fields:
        fields["torch_dtype"] = fields.pop("dtype")


def two_turns(model: transformers.PreTrainedModel, path: Path, *, stages: bool = True) -> None:
    """A prompt and its continuation: tokens as transformers has them, the second turn behind the first one's blocks."""
    report = inspect_checkpoint(path)
    assert report.parameters > 0
    runner = Runner(path, torch.float32, borders=(1,) if stages else ())
    prompt = torch.randint(3, 320, (2 * BLOCK + 5,), generator=torch.Generator().manual_seed(3)).tolist()
    (answer,) = runner.generate([prompt], 6, chunk=16, budget=40)
    assert_greedy(model, prompt, answer)
    first = runner.last
    blocks = list(first.blocks[:2])
    turn = [*prompt, *answer, 7, 8, 9]
    (second,) = runner.generate([turn], 4, chunk=16, budget=40, cached=first)
    assert runner.last.blocks[:2] == blocks
    assert_greedy(model, turn, second)


def folder_of(name: str, path: Path) -> transformers.PreTrainedModel:
    """Write a row of `FOLDERS`; returns the model."""
    architecture, case, changed, edit = FOLDERS[name]
    model_type, sizes = CASES[case]
    model = reference(model_type, {**sizes, **changed})
    model.save_pretrained(path)
    file = path / "config.json"
    fields = json.loads(file.read_text())
    spelled_as_before(fields)
    fields["architectures"] = [architecture]
    if edit is not None:
        edit(fields)
    file.write_text(json.dumps(fields))
    return model


def whole_of(name: str, path: Path) -> transformers.PreTrainedModel:
    """Write a row of `WHOLE`; returns the model."""
    model: transformers.PreTrainedModel = whole_model(*WHOLE[name])
    save_as_published(name, model, path)
    return model


def file_of(name: str, file: Path, tokenizer: Path | None = None) -> transformers.PreTrainedModel:
    """Write a row of `GGUF`; returns the model. `tokenizer`: a folder with one; None: tokens are only numbered."""
    case = GGUF[name]
    model_type, sizes = CASES[FILES[case][0]]
    model = reference(model_type, {**sizes, **CHANGED.get(case, {})})
    write(case, model, file, tokenizer=tokenizer)
    return model


@pytest.mark.parametrize("name", rows(FOLDERS, QUICK))
def test_a_folder_starts_as_published(name: str, tmp_path: Path) -> None:
    two_turns(folder_of(name, tmp_path), tmp_path, stages=FOLDERS[name][1] not in ONE_STAGE)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_model_with_further_parts_starts_as_published(name: str, tmp_path: Path) -> None:
    two_turns(whole_of(name, tmp_path), tmp_path)


@pytest.mark.parametrize("name", rows(GGUF, QUICK_GGUF))
def test_a_gguf_file_starts_as_converted(name: str, tmp_path: Path) -> None:
    model = file_of(name, tmp_path / "model.gguf")
    two_turns(model, tmp_path / "model.gguf", stages=FILES[GGUF[name]][0] not in ONE_STAGE)


def test_the_page_lists_what_starts_as_published() -> None:
    page = DOCS.read_text(encoding="utf-8")
    folders, files = re.findall(r"^\*\*(?:Folders|GGUF files):\*\* (.*?)\.$", page, re.MULTILINE | re.DOTALL)
    listed = [" ".join(text.split()).split("; ") for text in (folders, files)]
    assert listed == [[*FOLDERS], [f"{name} (`{case.partition(',')[0]}`)" for name, case in GGUF.items()]]
    assert len(FOLDERS) + len(WHOLE) >= 40
    assert len({case.partition(",")[0] for case in GGUF.values()}) >= 17
