"""Pictures of GGUF models: the part for pictures beside the file answers as the folder that both were made of."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.peers.gguf_files import finish
from moonpool.base.checkpoint import Tokenizer, inspect_checkpoint, resolve
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.errors import CheckpointError
from moonpool.engine.models.pictures import load_encoder
from tests.pictures import (
    PictureReference,
    add_weights,
    arranged_model,
    cell_model,
    expert_model,
    hybrid_model,
    older_patch_model,
    patch_model,
    picture_model,
    smolvlm_model,
    square_model,
    stacked_model,
)
from tests.unit.engine.models.test_gguf_families import DELTA_KEYS, FILES, MOE_KEYS, permuted, write
from tests.unit.engine.models.test_pictures import SIZES, TOLERANCE, computed, pictures_of, prompt_of

pytest.importorskip("PIL")
Values = NDArray[np.float32]


def with_layers(made: Callable[[Path], Path], kinds: list[str]) -> Callable[[Path], Path]:
    """A folder with layers of these kinds, which files do not list."""

    def make(folder: Path) -> Path:
        file = made(folder) / "config.json"
        config = json.loads(file.read_text())
        config["text_config"]["layer_types"] = kinds
        file.write_text(json.dumps(config))
        return folder

    return make


#: Folder, and architecture of the file, its family's case and further keys of converters.
MODELS: Mapping[str, tuple[Callable[[Path], Path], str, str, Mapping[str, Any]]] = {
    "Gemma 3": (
        with_layers(square_model, ["sliding_attention"] * 3),
        "gemma3",
        "gemma3",
        {"attention.sliding_window": 12, "rope.freq_base": 1e6},
    ),
    "Idefics3": (picture_model, "llama", "llama", {}),
    "SmolVLM": (smolvlm_model, "llama", "llama", {}),
    "InternVL 3": (arranged_model, "qwen2", "qwen2", {}),
    "Mistral Small 3.x": (cell_model, "llama", "llama", {}),
    "Qwen2-VL": (older_patch_model, "qwen2vl", "qwen2", {"rope.dimension_sections": [2, 3, 3, 0]}),
    "Qwen2.5-VL": (patch_model, "qwen2vl", "qwen2", {"rope.dimension_sections": [2, 3, 3, 0]}),
    "Qwen3-VL": (stacked_model, "qwen3vl", "qwen3", {"rope.dimension_sections": [3, 3, 2, 0]}),
    "Qwen3-VL, experts": (
        expert_model,
        "qwen3vlmoe",
        "qwen3_moe",
        {
            "rope.dimension_sections": [3, 3, 2, 0],
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": MOE_KEYS["expert_feed_forward_length"],
        },
    ),
    "Qwen3.5": (
        with_layers(hybrid_model, ["linear_attention", "full_attention"] * 2),
        "qwen35",
        "qwen3_5",
        {**DELTA_KEYS, "rope.dimension_sections": [1, 1, 0, 0]},
    ),
}
QUICK = ("Gemma 3", "Idefics3", "Qwen3-VL")
#: By `model_type`.
PROJECTORS = {
    "gemma3": "gemma3", "idefics3": "idefics3", "smolvlm": "idefics3", "qwen2_vl": "qwen2vl_merger",
    "internvl": "internvl", "mistral3": "pixtral",
}  # fmt: skip


def converted(
    folder: Path, place: Path, name: str, monkeypatch: pytest.MonkeyPatch, kind: str = "F32", **how: Any
) -> Path:
    """A folder's model and its encoder as llama.cpp's converters write them; returns the model's file."""
    _, architecture, case, keys = MODELS[name]
    auto: Any = transformers.AutoModelForImageTextToText
    whole = auto.from_pretrained(folder, dtype=torch.float32)
    decoder = getattr(whole.model, "language_model", None) or whole.model.text_model
    tensors = {f"model.{part}": tensor for part, tensor in decoder.state_dict().items()}
    tensors["lm_head.weight"] = whole.lm_head.weight.detach()
    text: Any = SimpleNamespace(config=whole.config.text_config, state_dict=lambda: tensors)
    place.mkdir(exist_ok=True)
    monkeypatch.setitem(FILES, architecture, (case, {"rope.dimension_count": text.config.head_dim, **keys}))
    write(architecture, text, place / "model-F32.gguf", tokenizer=folder)
    write_mmproj(whole, folder, place / "mmproj-model-F32.gguf", kind, **how)
    return place / "model-F32.gguf"


def write_mmproj(whole: Any, folder: Path, file: Path, kind: str, *, swapped: bool = False) -> None:
    """The encoder as llama.cpp's converters write it; `swapped`: as older ones wrote its networks."""
    config, model_type = whole.config, whole.config.model_type
    vision = config.vision_config.to_dict()
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(file, "clip")
    named = writer.add_clip_projector_type
    if model_type == "qwen3_vl":  # as beside an encoder of sound
        named = writer.add_clip_vision_projector_type
    named(PROJECTORS.get(model_type, "qwen2.5vl_merger" if model_type == "qwen2_5_vl" else "qwen3vl_merger"))
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    square = {
        name: side[0] if isinstance(side := vision.get(name, 560), list) else side
        for name in ("image_size", "patch_size")
    }
    writer.add_vision_image_size(square["image_size"])
    writer.add_vision_patch_size(square["patch_size"])
    writer.add_vision_embedding_length(vision.get("embed_dim", vision["hidden_size"]))
    writer.add_vision_block_count(vision.get("depth", vision.get("num_hidden_layers")))
    writer.add_vision_feed_forward_length(vision.get("intermediate_size") or 0)
    writer.add_vision_head_count(vision.get("num_heads", vision.get("num_attention_heads")))
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    writer.add_vision_attention_layernorm_eps(vision.get("layer_norm_eps", 1e-6))
    stacked = vision.get("deepstack_visual_indexes") or []
    if model_type in ("idefics3", "smolvlm"):
        writer.add_vision_projector_scale_factor(config.scale_factor)
        writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])
    elif model_type == "gemma3":
        writer.add_vision_projector_scale_factor(2)
    elif model_type == "internvl":
        writer.add_vision_use_gelu(True)
        writer.add_vision_projector_scale_factor(2)
        writer.add_uint32("clip.vision.preproc_min_tiles", processor["min_patches"])
        writer.add_uint32("clip.vision.preproc_max_tiles", processor["max_patches"])
    elif model_type == "mistral3":
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(config.spatial_merge_size)
    else:
        writer.add_uint32("clip.vision.image_min_pixels", processor["size"]["shortest_edge"])
        writer.add_uint32("clip.vision.image_max_pixels", processor["size"]["longest_edge"])
    if model_type == "qwen2_5_vl":
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", vision["window_size"])
    elif model_type.startswith("qwen3"):
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        writer.add_vision_is_deepstack_layers([index in stacked for index in range(vision["depth"])])
    for name, values in encoder_tensors(whole, stacked, split=model_type.startswith("qwen2")):
        if swapped:
            name = name.replace("ffn_up", "ffn_down") if "ffn_up" in name else name.replace("ffn_down", "ffn_up")
        dense = values.ndim == 1 or values.shape[-1] % 32 or "embd" in name or kind == "F32"
        number = gguf.GGMLQuantizationType["F32" if dense else kind]
        writer.add_tensor(name, values if dense else gguf.quantize(values, number), raw_dtype=number)
    finish(writer)


#: What the converter calls InternVL's projector.
INTERNVL = {
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def encoder_tensors(whole: Any, stacked: list[int], *, split: bool) -> Iterator[tuple[str, Values]]:
    """The encoder's tensors under the names that the `gguf` package has for them, as converters change them."""
    table, vision = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8), whole.config.vision_config
    for name, tensor in whole.model.state_dict().items():
        if name.startswith(("language_model.", "text_model.")):
            continue
        values: Values = np.ascontiguousarray(tensor.float().numpy())
        parts, _, kind = name.rpartition(".")
        merged = {
            "visual.merger.norm": "v.post_ln",
            "visual.merger.linear_fc1": "mm.0",
            "visual.merger.linear_fc2": "mm.2",
        }
        if parts in merged:
            yield f"{merged[parts]}.{kind}", values
        elif "deepstack_merger_list" in name:
            _, _, index, leaf, _ = name.split(".")
            yield f"v.deepstack.{stacked[int(index)]}.{leaf.removeprefix('linear_')}.{kind}", values
        elif values.ndim == 5:
            yield "v.patch_embd.weight", np.ascontiguousarray(values[:, :, 0])
            yield "v.patch_embd.weight.1", np.ascontiguousarray(values[:, :, 1])
        elif "attn.qkv" in name and split:
            for letter, rows in zip("qkv", np.split(values, 3), strict=True):
                theirs = table.get_name(name.replace("qkv", letter), try_suffixes=(".weight", ".bias"))
                assert theirs is not None, name
                yield theirs, np.ascontiguousarray(rows)
        else:
            published = name.replace("vision_tower.", "vision_tower.vision_model.")
            published = published.replace("mm_input_projection_weight", "mm_input_projection.weight")
            published = f"model.{published}" if name.startswith(("connector", "vision_model")) else published
            if whole.config.model_type == "mistral3":
                published, values = name, permuted(values, name, whole.config, vision.head_dim)
            elif whole.config.model_type == "internvl":
                published = (
                    f"model.{name}" if name.startswith("vision_tower") else INTERNVL.get(parts, name) + f".{kind}"
                )
                published += ".weight" if kind in ("lambda_1", "lambda_2", "position_embeddings") else ""
            theirs = table.get_name(published, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, published
            yield theirs, values + np.float32(theirs == "mm.soft_emb_norm.weight")


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name = request.param
    return name, add_weights(MODELS[name][0](tmp_path_factory.mktemp("model")))


def test_a_file_and_its_part_for_pictures_answer_as_the_folder(
    named: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = named
    file = converted(folder, tmp_path / "files", name, monkeypatch)
    assert resolve(str(file.parent)) == file
    text, pictures = "User:<image>What is it?<image> and", pictures_of(SIZES[:2])
    tokens, media = prompt_of(file, text, pictures)
    of_folder, folder_media = prompt_of(folder, text, pictures)
    assert tokens == of_folder
    assert {item.digest for item in media}.isdisjoint(item.digest for item in folder_media)
    encoder = load_encoder(file, torch.float32, torch.device("cpu"))
    assert encoder is not None
    assert inspect_checkpoint(file, "float32").picture_bytes == encoder.nbytes
    reference = PictureReference(folder)
    right = reference.logits(reference.inputs(text, [picture.content for picture in pictures]), [])
    found = computed(file, encoder, tokens, media, 16)
    assert (found - right).abs().max() < TOLERANCE * right.abs().max()


def test_another_part_gives_other_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the KV of pictures was computed with is in their names: a part of another type is another one."""
    folder = add_weights(picture_model(tmp_path / "folder"))
    found = [
        prompt_of(converted(folder, tmp_path / kind, "Idefics3", monkeypatch, kind), "<image>", pictures_of(SIZES[:1]))
        for kind in ("F32", "Q8_0")
    ]
    (first,), (second,) = (media for _, media in found)
    assert first.digest != second.digest
    rows = [
        encoder.rows(first)
        for kind in ("F32", "Q8_0")
        if (encoder := load_encoder(tmp_path / kind / "model-F32.gguf", torch.float32, torch.device("cpu"))) is not None
    ]
    assert not torch.equal(*rows)
    assert (rows[0] - rows[1]).abs().max() < 0.1 * rows[0].abs().max()


def test_older_files_have_networks_under_each_others_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_weights(picture_model(tmp_path / "folder"))
    new, old = (converted(folder, tmp_path / str(old), "Idefics3", monkeypatch, swapped=old) for old in (False, True))
    _, (item,) = prompt_of(new, "<image>", pictures_of(SIZES[:1]))
    encoders = [load_encoder(file, torch.float32, torch.device("cpu")) for file in (new, old)]
    first, second = (encoder.rows(item) for encoder in encoders if encoder is not None)
    assert torch.equal(first, second)


def test_what_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_weights(picture_model(tmp_path / "folder"))
    file = converted(folder, tmp_path / "files", "Idefics3", monkeypatch)
    part = file.parent / "mmproj-model-F32.gguf"

    def rule() -> object:
        return read_rule(file, lambda: Tokenizer.load(file))

    with pytest.raises(CheckpointError, match="is the part for pictures; name the model"):
        resolve(str(part))
    whole = part.read_bytes()
    part.write_bytes(whole.replace(b"v.blk.0.ffn_down.weight", b"v.blk.0.ffn_gone.weight"))
    with pytest.raises(
        CheckpointError, match=r"tensor v\.blk\.0\.ffn_down\.weight of the encoder of pictures is missing"
    ):
        load_encoder(file, torch.float32, torch.device("cpu"))
    part.write_bytes(whole)
    other = part.with_name("mmproj-model-copy.gguf")
    other.write_bytes(part.read_bytes())
    assert "several parts for pictures are for model-F32.gguf: mmproj-model-F32.gguf, mmproj-model-copy.gguf" in str(
        rule()
    )
    other.unlink()
    patch = add_weights(patch_model(tmp_path / "other"))
    part.rename(tmp_path / "away.gguf")
    assert rule() == "the checkpoint has no encoder of pictures"
    assert load_encoder(file, torch.float32, torch.device("cpu")) is None
    auto: Any = transformers.AutoModelForImageTextToText
    write_mmproj(auto.from_pretrained(patch, dtype=torch.float32), patch, part, "F32")
    assert "clip.projector_type: 'qwen2.5vl_merger' for llama is not built" in str(rule())
