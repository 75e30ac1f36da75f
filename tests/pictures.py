"""A tiny model with pictures, in the shape in which SmolVLM is published, and pictures to show it."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.client import Message

SIDE, LONGEST, ROWS = 32, 128, 4
"""Pixels of a square's side, of the longest side, and rows of the encoder for a square."""
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": SIDE},
    "rescale_factor": 1 / 255,
    "resample": 1,
    "size": {"longest_edge": LONGEST},
}
_CELLS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>", *_CELLS]


def picture_model(folder: Path) -> Path:
    """Write all files of the model but the weights."""
    vision = {
        "model_type": "idefics3_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8,
    }  # fmt: skip
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "scale_factor": 2,
        "vision_config": vision, "text_config": {"model_type": "llama"},
    }  # fmt: skip
    return _written(folder, SPECIAL, "<image>", config, PROCESSOR, {"image_seq_len": ROWS}, TEMPLATE)


CELL, CELLS_LONGEST = 16, 96
"""Pixels of a cell's side and of the longest side, of the model with cells."""
CELL_PROCESSOR: dict[str, Any] = {
    **{name: value for name, value in PROCESSOR.items() if name not in ("do_image_splitting", "max_image_size")},
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 8,
    "resample": 3,
    "size": {"longest_edge": CELLS_LONGEST},
}
CELL_TEMPLATE = (
    "{% for message in messages %}{{ '[INST]' if message['role'] == 'user' else '' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '[IMG]' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '[/INST]' if message['role'] == 'user' else eos_token }}{% endfor %}"
)


def cell_model(folder: Path) -> Path:
    """Write a tiny model in the shape of Mistral Small 3.1, without the weights."""
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "head_dim": 16, "image_size": CELLS_LONGEST, "patch_size": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "spatial_merge_size": 2,
        "vision_config": vision, "text_config": {"model_type": "mistral"}, "vision_feature_layer": -1,
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    }  # fmt: skip
    special = ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<end_of_utterance>"]
    further = {"patch_size": 8, "spatial_merge_size": 2}
    return _written(folder, special, "[IMG]", config, CELL_PROCESSOR, further, CELL_TEMPLATE)


ARRANGED_PROCESSOR: dict[str, Any] = {
    **{name: value for name, value in PROCESSOR.items() if name not in ("do_image_splitting", "max_image_size")},
    "image_processor_type": "GotOcr2ImageProcessor",
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 6,
    "resample": 3,
    "size": {"height": SIDE, "width": SIDE},
}
ARRANGED_ROWS = 4
"""Rows of the encoder for a square of the model with arrangements."""
ARRANGED_TEMPLATE = CELL_TEMPLATE.replace("[IMG]", "<IMG_CONTEXT>\\n")


def arranged_model(folder: Path) -> Path:
    """Write a tiny model in the shape of InternVL 3, without the weights."""
    vision = {
        "model_type": "internvl_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": [SIDE, SIDE], "patch_size": [8, 8],
    }  # fmt: skip
    config = {
        "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "downsample_ratio": 0.5,
        "image_seq_length": ARRANGED_ROWS, "vision_config": vision, "text_config": {"model_type": "qwen2"},
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
    }  # fmt: skip
    special = ["[INST]", "[/INST]", "<IMG_CONTEXT>", "<img>", "</img>", "<end_of_utterance>"]
    further = {"image_seq_length": ARRANGED_ROWS}
    return _written(folder, special, "<IMG_CONTEXT>", config, ARRANGED_PROCESSOR, further, ARRANGED_TEMPLATE)


PATCH_PROCESSOR: dict[str, Any] = {
    **{
        name: value
        for name, value in PROCESSOR.items()
        if name not in ("do_image_splitting", "max_image_size", "do_pad")
    },
    "image_processor_type": "Qwen2VLImageProcessor",
    "merge_size": 2,
    "patch_size": 8,
    "resample": 3,
    "size": {"shortest_edge": 2 * CELL**2, "longest_edge": 30 * CELL**2},
    "temporal_patch_size": 2,
}
PATCH_TEMPLATE = CELL_TEMPLATE.replace("[IMG]", "<|vision_start|><|image_pad|><|vision_end|>")


def patch_model(folder: Path) -> Path:
    """Write a tiny model in the shape of Qwen2.5-VL, without the weights."""
    vision = {
        "model_type": "qwen2_5_vl", "hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 64,
        "window_size": 32, "fullatt_block_indexes": [1],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vision_config": vision,
        "text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": rope},
    }  # fmt: skip
    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    special = ["[INST]", "[/INST]", *marks, "<end_of_utterance>"]
    return _written(folder, special, "<|image_pad|>", config, PATCH_PROCESSOR, {}, PATCH_TEMPLATE)


def stacked_model(folder: Path) -> Path:
    """Write a tiny model in the shape of Qwen3-VL, without the weights: two layers more add rows."""
    vision = {
        "model_type": "qwen3_vl", "hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 2,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 64,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "vision_config": vision,
        "text_config": {"model_type": "qwen3_vl_text", "rope_parameters": rope, "num_hidden_layers": 4},
    }  # fmt: skip
    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    special = ["[INST]", "[/INST]", *marks, "<end_of_utterance>"]
    return _written(folder, special, "<|image_pad|>", config, PATCH_PROCESSOR, {}, PATCH_TEMPLATE)


def smolvlm_model(folder: Path) -> Path:
    """Write `picture_model` under SmolVLM's own names."""
    vision = {"model_type": "smolvlm_vision"}
    return _renamed(picture_model(folder), "SmolVLMForConditionalGeneration", "smolvlm", {}, vision)


def older_patch_model(folder: Path) -> Path:
    """Write a tiny model in the shape of Qwen2-VL, without the weights."""
    vision = {"model_type": "qwen2_vl", "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    text = {"model_type": "qwen2_vl_text"}
    return _renamed(patch_model(folder), "Qwen2VLForConditionalGeneration", "qwen2_vl", text, vision)


def hybrid_model(folder: Path) -> Path:
    """Write a tiny model in the shape of Qwen3.5, without the weights: layers with a state, partial RoPE."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    text = {
        "model_type": "qwen3_5_text", "rope_parameters": {**rope, "mrope_section": [1, 1, 0]},
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }  # fmt: skip
    vision = {"model_type": "qwen3_5"}
    return _renamed(stacked_model(folder), "Qwen3_5ForConditionalGeneration", "qwen3_5", text, vision)


SQUARE, SQUARE_ROWS, WINDOW = 64, 16, 12
"""Pixels of a picture's side, rows of the encoder, and tokens that layers see, fewer than a picture has."""
SQUARE_PROCESSOR: dict[str, Any] = {
    **{
        name: value
        for name, value in PROCESSOR.items()
        if name not in ("do_image_splitting", "max_image_size", "do_pad")
    },
    "image_processor_type": "Gemma3ImageProcessor",
    "do_pan_and_scan": None,
    "resample": 2,
    "size": {"height": SQUARE, "width": SQUARE},
}
SQUARE_TEMPLATE = CELL_TEMPLATE.replace("[IMG]", "<start_of_image>")


def square_model(folder: Path) -> Path:
    """Write a tiny model in the shape of Gemma 3, without the weights: tokens of a picture see all of the picture."""
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": SQUARE, "patch_size": 8, "vision_use_head": False,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {
        "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"sliding_attention": rope, "full_attention": {**rope, "rope_theta": 1e6}},
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": vision,
        "text_config": text, "mm_tokens_per_image": SQUARE_ROWS,
    }  # fmt: skip
    marks = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    special = ["[INST]", "[/INST]", *marks, "<end_of_utterance>"]
    further = {"image_seq_length": SQUARE_ROWS, "processor_class": "Gemma3Processor"}
    return _written(folder, special, "<image_soft_token>", config, SQUARE_PROCESSOR, further, SQUARE_TEMPLATE)


def expert_model(folder: Path) -> Path:
    """Write a tiny model in the shape of Qwen3-VL with experts, without the weights."""
    text = {
        "model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    vision = {"model_type": "qwen3_vl_moe"}
    return _renamed(stacked_model(folder), "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", text, vision)


def _renamed(folder: Path, name: str, kind: str, text: dict[str, Any], vision: dict[str, Any]) -> Path:
    """The folder as a model of another name, with other fields."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [name], "model_type": kind}
    config["text_config"] |= text
    config["vision_config"] |= vision
    file.write_text(json.dumps(config))
    return folder


def _written(
    folder: Path,
    special: list[str],
    mark: str,
    config: dict[str, Any],
    processor: dict[str, Any],
    further: dict[str, Any],
    template: str,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<end_of_utterance>")
    text = {
        "vocab_size": tokenizer.get_vocab_size() + 7 & ~7, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "pad_token_id": 2, "eos_token_id": end, "tie_word_embeddings": False,
        **config["text_config"],
    }  # fmt: skip
    whole = {
        "image_token_id": tokenizer.token_to_id(mark), "tie_word_embeddings": False, "eos_token_id": end,
        "dtype": "float32", "pad_token_id": 2, **config, "text_config": text,
    }  # fmt: skip
    for name, content in (
        ("config.json", whole),
        ("preprocessor_config.json", processor),
        ("processor_config.json", further),
        ("tokenizer_config.json", {"chat_template": template, "eos_token": "<end_of_utterance>"}),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


def picture_file(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """A picture of coloured noise, larger spots first. Needs Pillow."""
    from PIL import Image

    draw = random.Random(seed)
    spots = Image.frombytes("RGB", (4, 4), draw.randbytes(48)).resize((width, height))
    file = io.BytesIO()
    spots.save(file, kind)
    return file.getvalue()


def add_weights(folder: Path, seed: int = 6) -> Path:
    """Write random weights beside the other files. Needs transformers."""
    import torch
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            if "norm" in name:
                weight.add_(drawn * 0.2)
            elif name.endswith("bias"):
                weight.copy_(drawn * 0.1)
            else:
                weight.copy_(drawn * (0.5 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5))
    kept = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(kept)
    if config.model_type == "qwen3_vl_moe":  # published as [experts, inputs, outputs]
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        tensors = {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    return folder


class PictureReference:
    """The model as transformers runs it, with transformers' processor. Needs Pillow."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        auto: Any = transformers.AutoModelForImageTextToText
        self.model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train(False)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        self._mark = str(self._tokenizer.id_to_token(self.model.config.image_token_id))
        kind = self.model.config.model_type
        if kind == "gemma3":
            self._mark = "<start_of_image>"
        kinds = {"mistral3": self._cells, "internvl": self._arranged, "gemma3": self._square}
        self._shown = kinds.get(kind, self._patches if kind.startswith("qwen") else self._squares)

    def text_of(self, messages: Sequence[Message]) -> str:
        """A conversation as the model's template writes it, with `<image>` in the place of each picture."""
        shown = []
        for message in messages:
            parts = message.get("parts") or [{"text": message["content"]}]
            content = [
                {"type": "image"} if "picture" in part else {"type": "text", "text": part["text"]} for part in parts
            ]
            shown.append({"role": message["role"], "content": content})
        how = {"add_generation_prompt": True, "eos_token": "<end_of_utterance>"}
        text: str = jinja2.Template(self._template).render(messages=shown, **how)
        return text.replace(self._mark, "<image>")

    def inputs(self, text: str, files: list[bytes], *, low: bool = False) -> dict[str, Any]:
        """What the model takes for a prompt with `<image>` in the place of each picture."""
        import torch
        from PIL import Image

        given: dict[str, Any] = {}
        if files:
            images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
            shown, given = self._shown(images, low=low)
            first, *rest = text.split("<image>")
            text = first + "".join(picture + part for picture, part in zip(shown, rest, strict=True))
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return {"input_ids": torch.tensor([ids]), **given}

    def _squares(self, images: list[Any], *, low: bool) -> tuple[list[str], dict[str, Any]]:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        how = {"do_image_splitting": False} if low else {}
        processor: Any = Idefics3ImageProcessorPil(**PROCESSOR)
        given = dict(processor([images], return_row_col_info=True, return_tensors="pt", **how))
        cells = list(zip(given.pop("rows")[0], given.pop("cols")[0], strict=True))
        marks = ("<fake_token_around_image>", "<image>", "<global-img>")
        shown: Any = get_image_prompt_string
        return [shown(*cell, ROWS, *marks) for cell in cells], given

    def _arranged(self, images: list[Any], *, low: bool) -> tuple[list[str], dict[str, Any]]:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        processor: Any = GotOcr2ImageProcessorPil(**ARRANGED_PROCESSOR)
        given = dict(processor(images, return_tensors="pt", crop_to_patches=not low))
        squares = [int(count) for count in given.pop("num_patches")]
        return [f"<img>{'<IMG_CONTEXT>' * (ARRANGED_ROWS * count)}</img>" for count in squares], given

    def _patches(self, images: list[Any], *, low: bool) -> tuple[list[str], dict[str, Any]]:
        assert not low, "transformers has no such word"
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor: Any = Qwen2VLImageProcessorPil(**PATCH_PROCESSOR)
        given = dict(processor(images, return_tensors="pt"))
        return ["<|image_pad|>" * (int(grid.prod()) // 4) for grid in given["image_grid_thw"]], given

    def _square(self, images: list[Any], *, low: bool) -> tuple[list[str], dict[str, Any]]:
        del low
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        processor: Any = Gemma3ImageProcessorPil(**SQUARE_PROCESSOR)
        given = dict(processor(images, return_tensors="pt"))
        shown = f"\n\n<start_of_image>{'<image_soft_token>' * SQUARE_ROWS}<end_of_image>\n\n"
        return [shown] * int(given.pop("num_crops").shape[0]), given

    def _cells(self, images: list[Any], *, low: bool) -> tuple[list[str], dict[str, Any]]:
        assert not low, "transformers has no such word"
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        processor: Any = PixtralImageProcessorPil(**CELL_PROCESSOR)
        given = dict(processor(images, return_tensors="pt", patch_size=CELL))
        shown = []
        for height, width in given["image_sizes"].tolist():
            rows = "[IMG_BREAK]".join(["[IMG]" * (width // CELL)] * (height // CELL))
            shown.append(f"{rows}[IMG_END]")
        return shown, given

    def logits(self, inputs: dict[str, Any], answer: list[int]) -> Any:
        """Logits that choose each token of an answer, and the one behind, [n + 1, vocabulary]."""
        import torch

        ids = torch.cat([inputs["input_ids"], torch.tensor([answer], dtype=torch.int64)], 1)
        kinds = {}
        if "image_grid_thw" in inputs:
            kinds["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        if self.model.config.model_type == "gemma3":
            kinds["token_type_ids"] = (ids == self.model.config.image_token_id).int()
        with torch.inference_mode():
            return self.model(**{**inputs, **kinds, "input_ids": ids}).logits[0, -len(answer) - 1 :]
