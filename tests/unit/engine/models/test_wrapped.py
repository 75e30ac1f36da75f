"""Text parts of models with pictures: transformers makes a tiny whole model, saves it as such models are published, and
greedy float32 tokens are the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moonpool.base.checkpoint import inspect_checkpoint, load_config
from moonpool.base.errors import UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.wrapped import WRAPPER, decoder_names, wrapped_names
from tests.unit.engine.models.forward import Runner
from tests.unit.engine.models.test_families import CASES, HEAD, TINY
from tests.unit.engine.models.test_parity import assert_greedy

_SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "embed_dim": 32, "out_hidden_size": 64, "image_size": 32, "patch_size": 8, "num_key_value_heads": 2,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "mlp_ratio": 2, "head_dim": 16,
}  # fmt: skip
"""Sizes of the part for pictures, under all names."""
MROPE = {"mrope_section": [2, 3, 3], "rope_theta": 10000.0, "rope_type": "default"}
HALF_TURNED = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
WHOLE: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "Aya Vision": ("aya_vision", "cohere2", {**CASES["cohere2"][1]}),
    "Cohere2 Vision": ("cohere2_vision", "cohere2", {**CASES["cohere2"][1]}),
    "EXAONE 4.5": ("exaone4_5", "exaone4", {**CASES["exaone4"][1]}),
    "Gemma 3": ("gemma3", "gemma3_text", {**CASES["gemma3"][1]}),
    "GLM-4.1V": ("glm4v", "glm4v_text", {**HEAD, "rope_parameters": HALF_TURNED}),
    "GLM-4.5V": (
        "glm4v_moe",
        "glm4v_moe_text",
        {**CASES["glm4_moe"][1], "use_qk_norm": False, "rope_parameters": HALF_TURNED},
    ),
    "LightOnOCR": ("lighton_ocr", "qwen3", {**HEAD}),
    "Idefics3": ("idefics3", "llama", {}),
    "InternVL": ("internvl", "qwen2", {}),
    "Kimi K2.5": ("kimi_k25", "deepseek_v3", {**CASES["deepseek_v3"][1]}),
    "LFM2-VL": ("lfm2_vl", "lfm2", {**CASES["lfm2"][1]}),
    "LLaVA": ("llava", "llama", {}),
    "LLaVA-OneVision": ("llava_onevision", "qwen2", {}),
    "Ministral 3": ("mistral3", "ministral3", {**CASES["ministral3"][1]}),
    "Mistral Small 3": ("mistral3", "mistral", {}),
    "Qwen2-VL": ("qwen2_vl", "qwen2_vl_text", {"rope_parameters": MROPE}),
    "Qwen2.5-VL": ("qwen2_5_vl", "qwen2_5_vl_text", {"rope_parameters": MROPE}),
    "Qwen3-VL": ("qwen3_vl", "qwen3_vl_text", {**HEAD, "rope_parameters": {**MROPE, "mrope_interleaved": True}}),
    "Qwen3-VL, experts": (
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        {
            **HEAD,
            "moe_intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": MROPE,
        },
    ),
    "SmolVLM": ("smolvlm", "llama", {}),
}


def whole_model(model_type: str, text_type: str, changed: Mapping[str, Any]) -> Any:
    """A tiny model with random weights, of which norms and biases differ from 1 and 0."""
    known = transformers.AutoConfig.for_model(model_type)
    vision = known.vision_config
    if vision is not None:
        for name, size in _SMALL.items():
            if hasattr(vision, name):
                setattr(vision, name, size)
    text = transformers.AutoConfig.for_model(text_type, **{**TINY, **changed})
    own = {} if vision is None else {"vision_config": vision.to_dict()}
    config = transformers.AutoConfig.for_model(model_type, text_config=text.to_dict(), **own)
    config.tie_word_embeddings = getattr(config.text_config, "tie_word_embeddings", False)
    torch.manual_seed(6)
    auto: Any = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.train(False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            if "norm" in name:
                weight.add_(drawn * 0.2)
            elif name.endswith("bias"):
                weight.copy_(drawn * 0.1)
            else:
                weight.copy_(drawn * (0.5 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5))
    return model


def save_as_published(case: str, model: Any, folder: Path) -> None:
    """Save as transformers does, but where publishers' folders differ from that."""
    model.save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, fields = load_file(file), json.loads(config.read_text())
    match case:
        case "Kimi K2.5":
            tensors = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in tensors.items()}
            fields["text_config"]["model_type"] = "kimi_k2"
        case "Qwen2-VL":  # the decoder's fields are the whole model's, in the old spelling
            fields |= {**fields.pop("text_config"), "model_type": "qwen2_vl", "rope_theta": 10000.0}
            fields["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
            del fields["rope_parameters"]
        case "Qwen3-VL, experts":  # inputs first
            tensors = {
                name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
                for name, tensor in tensors.items()
            }
        case _:
            return
    save_file(tensors, file)
    config.write_text(json.dumps(fields))


@pytest.mark.parametrize("case", WHOLE)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = whole_model(*WHOLE[case])
    save_as_published(case, model, tmp_path)
    prompt = torch.randint(3, 320, (47,), generator=torch.Generator().manual_seed(3)).tolist()
    (answer,) = Runner(tmp_path, torch.float32, borders=(1,)).generate([prompt], 6, chunk=16, budget=40)
    assert_greedy(model, prompt, answer)
    report = inspect_checkpoint(tmp_path)
    parts = ("language_model", "text_model")
    decoder = {name: x for name, x in model.state_dict().items() if any(part in name for part in parts)}
    head = 0 if report.config.tie_word_embeddings else model.lm_head.weight.numel()
    assert report.parameters == head + sum(map(torch.numel, decoder.values()))


def test_what_only_the_whole_model_says_counts_for_the_text_part(tmp_path: Path) -> None:
    model = whole_model("llava", "llama", {})
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for key in ("eos_token_id", "bos_token_id", "dtype"):
        fields["text_config"].pop(key, None)
    (tmp_path / "generation_config.json").unlink()
    file.write_text(json.dumps({**fields, "eos_token_id": 7, "bos_token_id": 3, "dtype": "bfloat16"}))
    config = load_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((7,), 3, "bfloat16")


@pytest.mark.parametrize(
    ("stored", "said", "tied"), [(True, None, False), (False, None, True), (False, False, True), (True, True, True)]
)
def test_the_stored_head_tells_where_a_folder_does_not(
    stored: bool, said: bool | None, tied: bool, tmp_path: Path
) -> None:
    model = whole_model("llava", "llama", {})
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for part in (fields, fields["text_config"]):
        part.pop("tie_word_embeddings", None)
    file.write_text(json.dumps(fields if said is None else {**fields, "tie_word_embeddings": said}))
    if not stored:
        weights = tmp_path / "model.safetensors"
        save_file({name: x for name, x in load_file(weights).items() if "lm_head" not in name}, weights)
    assert load_config(tmp_path).tie_word_embeddings is tied


def test_sizes_of_the_configuration_class_hold_where_a_text_part_leaves_them_out(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}  # as Gemma 3 4B has them
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = load_config(tmp_path)
    assert (config.vocab_size, config.num_heads, config.intermediate_size) == (262208, 8, 9216)


@pytest.mark.parametrize(
    ("model_type", "text_type", "named"), [("paligemma", "gemma", "model_type"), ("other", "other", "architectures")]
)
def test_a_text_part_that_is_no_family_is_refused_by_name(
    model_type: str, text_type: str, named: str, tmp_path: Path
) -> None:
    fields = {**TINY, "model_type": text_type}
    whole = {"architectures": [f"Other{WRAPPER}"], "model_type": model_type, "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UnsupportedModel, match=named):
        load_config(tmp_path)


def test_a_name_of_the_decoder_is_found_behind_each_prefix() -> None:
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        wrapped = wrapped_names(name)
        assert all(decoder_names([stored]) == {stored: name} for stored in wrapped)
        assert len(wrapped) == (4 if name.startswith("model.") else 2)
    assert not decoder_names(["vision_tower.model.layers.0.weight", "visual.blocks.0.weight"])


def test_every_family_of_whole_models_has_a_case() -> None:
    names = {family.model_type for name, family in FAMILIES.items() if name.endswith(WRAPPER)}
    assert names <= {text_type for _, text_type, _ in WHOLE.values()}
