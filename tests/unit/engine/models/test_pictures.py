"""The encoder of pictures beside transformers' own model: logits of prompts in chunks of every size."""

import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from moonpool.base.checkpoint import Tokenizer, inspect_checkpoint, load_config
from moonpool.base.checkpoint.picture_rule import engine_rule, read_rule
from moonpool.base.errors import CheckpointError
from moonpool.base.kv.keys import BlockKey, tokens_to_bytes
from moonpool.base.kv.media import MediaItem
from moonpool.base.pictures.files import Picture
from moonpool.base.pictures.rule import with_pictures
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.steps import ENCODER, MEMORY, STORE, SequenceSampling, SequenceStep
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.pictures import PictureEncoder, load_encoder
from moonpool.engine.models.whole_pictures import with_rests
from moonpool.engine.request import IncomingRequest
from tests.pictures import (
    PictureReference,
    add_weights,
    arranged_model,
    cell_model,
    expert_model,
    hybrid_model,
    older_patch_model,
    patch_model,
    picture_file,
    picture_model,
    smolvlm_model,
    square_model,
    stacked_model,
)
from tests.unit.engine.models.forward import BLOCK, Runner

pytest.importorskip("PIL")
SIZES = ((40, 30), (7, 90), (128, 128))
TOLERANCE = 1e-4


MODELS = {
    "Gemma 3": square_model,
    "Idefics3": picture_model,
    "InternVL": arranged_model,
    "Mistral 3": cell_model,
    "Qwen2-VL": older_patch_model,
    "Qwen2.5-VL": patch_model,
    "Qwen3-VL": stacked_model,
    "Qwen3-VL, experts": expert_model,
    "Qwen3.5": hybrid_model,
    "SmolVLM": smolvlm_model,
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(MODELS[request.param](tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PictureReference:
    return PictureReference(folder)


@pytest.fixture
def encoder(folder: Path) -> PictureEncoder:
    found = load_encoder(folder, torch.float32, torch.device("cpu"))
    assert found is not None
    return found


def prompt_of(folder: Path, text: str, pictures: list[Picture]) -> "tuple[array[int], tuple[MediaItem, ...]]":
    tokenizer = Tokenizer.load(folder)
    rule = read_rule(folder, lambda: tokenizer)
    assert not isinstance(rule, str)
    marks = ("<image>", "[IMG]", "<IMG_CONTEXT>", "<|image_pad|>", "<image_soft_token>")
    (mark,) = {text for text in marks if tokenizer.special_id(text) == rule.mark}
    _, written = rule.written or ("", mark)
    return with_pictures("messages", rule, tokenizer.encode(text.replace("<image>", written), False), pictures)


def pictures_of(sizes: tuple[tuple[int, int], ...], detail: str = "") -> list[Picture]:
    return [Picture(picture_file(*size, seed=seed), *size, detail) for seed, size in enumerate(sizes)]


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(length, start + size)


def computed(
    folder: Path,
    encoder: PictureEncoder,
    tokens: "array[int]",
    media: tuple[MediaItem, ...],
    size: int,
    stored: torch.dtype | None = None,
    borders: tuple[int, ...] = (),
    rows: Mapping[bytes, bytes] = MappingProxyType({}),
) -> torch.Tensor:
    """Logits behind the prompt, computed in chunks of so many tokens.

    `stored`: the type of quantised KV. `borders`: layers where a further stage begins. `rows`: as of `SequenceStep`.
    """
    runner, rule = Runner(folder, torch.float32, borders, stored=stored), engine_rule(folder)
    assert not isinstance(rule, str)
    seen = EngineRequest((), len(tokens), len(tokens))
    request = IncomingRequest("r", tokens, BlockKey(bytes(32)), SequenceSampling(len(tokens)), seen, media=media)
    request = request.with_checked_pictures(rule)
    table = list(range(-(-len(tokens) // BLOCK)))
    for start, end in chunks(len(tokens), size):
        part = tokens_to_bytes(tokens[start:end])
        here = tuple(item for item in media if item.begin < end and start < item.end)
        shift = request.rope_shift(start)
        step = SequenceStep(part, start, tuple(table), media=here, picture_rows=rows, rope_shift=shift)
        steps, pictures = with_rests([step], BLOCK) if runner.config.decoder.whole_pictures else ([step], [])
        packed = [(each.token_ids, each.start, each.block_table) for each in steps]
        hidden = torch.empty(0)
        for stage in runner.stages:  # each makes a batch of its own
            batch = PackedBatch.build(packed, BLOCK, full_hits=range(1, len(steps)))
            batch.pictures = pictures
            if stage.picture_positions is not None:
                stage.picture_positions.set_positions(batch, steps)
            if stage.is_first:
                hidden = stage.embed(batch.token_ids, batch.positions)
            if stage.is_first and here:
                encoder.place(hidden, steps, batch)
            layers = slice(stage.layer_begin, stage.layer_end)
            scales = None if runner.scales is None else runner.scales[layers]
            _, hidden = stage.run(hidden, batch, runner.pool[layers], layers.start, layers.stop, scales=scales)
    return runner.stages[-1].logits(hidden[end - start - 1 : end - start])


def test_stages_know_the_places_of_pictures(folder: Path, encoder: PictureEncoder) -> None:
    """Also Qwen3-VL's, whose encoder adds to the two layers of the first stage."""
    prompt, layers = prompt_of(folder, "a<image>b<image>c", pictures_of(SIZES[:2])), load_config(folder).num_layers
    whole, parted = (computed(folder, encoder, *prompt, 7, borders=borders) for borders in ((), (layers // 2,)))
    assert (parted - whole).abs().max() < TOLERANCE * whole.abs().max()


@pytest.mark.parametrize("size", [1, 7, 16, 64, 512])
def test_logits_are_those_of_transformers_wherever_chunks_end(
    folder: Path, reference: PictureReference, encoder: PictureEncoder, size: int
) -> None:
    sizes = SIZES[:2] if size == 1 else SIZES
    text = "User:<image>What is it?" + "<image> and" * (len(sizes) - 1)
    pictures = pictures_of(sizes)
    tokens, media = prompt_of(folder, text, pictures)
    inputs = reference.inputs(text, [picture.content for picture in pictures])
    assert inputs["input_ids"][0].tolist() == tokens.tolist()
    right, found = reference.logits(inputs, []), computed(folder, encoder, tokens, media, size)
    assert (found - right).abs().max() < TOLERANCE * right.abs().max()
    assert encoder.encoded == len(sizes), "each picture once, however many chunks"


def test_a_picture_of_low_detail_is_one_square(
    folder: Path, reference: PictureReference, encoder: PictureEncoder
) -> None:
    if reference.model.config.model_type.startswith(("gemma3", "mistral3", "qwen")):
        pytest.skip("transformers has no such word")
    pictures = pictures_of(((90, 50),), "low")
    tokens, media = prompt_of(folder, "<image>?", pictures)
    inputs = reference.inputs("<image>?", [pictures[0].content], low=True)
    assert inputs["input_ids"][0].tolist() == tokens.tolist()
    right, found = reference.logits(inputs, []), computed(folder, encoder, tokens, media, 64)
    assert (found - right).abs().max() < TOLERANCE * right.abs().max()


def test_whole_pictures_of_quantised_kv_do_not_depend_on_where_chunks_end(tmp_path: Path) -> None:
    """What a chunk computes beside, for no block, counts as blocks would have it."""
    folder = add_weights(square_model(tmp_path))
    encoder = load_encoder(folder, torch.float32, torch.device("cpu"))
    assert encoder is not None
    prompt = prompt_of(folder, "a b<image>c<image>", pictures_of(SIZES[:2]))
    whole = computed(folder, encoder, *prompt, 512, torch.int8)
    for size in (5, 16, 29):
        cut = computed(folder, encoder, *prompt, size, torch.int8)
        assert (cut - whole).abs().max() < TOLERANCE * whole.abs().max(), size
    plain = computed(folder, encoder, *prompt, 512)
    assert (plain - whole).abs().max() > 10 * TOLERANCE * whole.abs().max(), "KV is quantised"


def test_the_encoder_is_counted_before_it_is_loaded(folder: Path, encoder: PictureEncoder) -> None:
    assert inspect_checkpoint(folder).picture_bytes == encoder.nbytes


def test_another_picture_gives_other_logits_and_the_same_the_same_rows(folder: Path, encoder: PictureEncoder) -> None:
    one, two = (Picture(picture_file(40, 30, seed=seed), 40, 30) for seed in (1, 2))
    found = [computed(folder, encoder, *prompt_of(folder, "a<image>b", [picture]), 64) for picture in (one, two, one)]
    assert (found[0] - found[1]).abs().max() > 0.01
    assert torch.equal(found[0], found[2])
    assert encoder.encoded == 2
    assert [picture.source for picture in encoder.take_placed()] == [ENCODER, ENCODER, MEMORY]
    assert encoder.take_placed() == ()


def test_rows_that_come_with_a_step_need_no_encoder(folder: Path, encoder: PictureEncoder) -> None:
    prompt = prompt_of(folder, "a<image>b<image>c", pictures_of(SIZES[:2]))
    digests = [item.digest for item in prompt[1]]
    right = computed(folder, encoder, *prompt, 16, rows=dict.fromkeys(digests, b""))
    told = {picture.digest: picture.rows for picture in encoder.take_placed() if picture.source == ENCODER}
    assert list(told) == digests
    assert all(told.values())
    again = load_encoder(folder, torch.float32, torch.device("cpu"))
    assert again is not None
    assert torch.equal(computed(folder, again, *prompt, 16, rows=told), right)
    assert again.encoded == 0
    assert {picture.source for picture in again.take_placed()} <= {STORE, MEMORY}
    other = load_encoder(folder, torch.float32, torch.device("cpu"))
    assert other is not None
    cut = {digests[0]: told[digests[0]][:-4], digests[1]: told[digests[1]]}
    assert torch.equal(computed(folder, other, *prompt, 16, rows=cut), right)
    assert other.encoded == 1, "rows of another size are not taken"


def test_a_folder_without_the_encoders_weights_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    ends = ("modality_projection.proj", "linear_2", "merger.mlp.2", "visual.merger.linear_fc2", "mm_soft_emb_norm")
    (left_out,) = [name for name in tensors if name.removesuffix(".weight").endswith(ends)]
    del tensors[left_out]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {left_out.removeprefix('model.')} of the encoder"):
        load_encoder(tmp_path / "model", torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensor: tensor.to(torch.float8_e4m3fn), r"is quantised \(float8_e4m3fn\)"),
        (lambda tensor: tensor.to(torch.int8), r"is quantised \(int8\)"),
        (lambda tensor: tensor[:1].clone(), r"has shape \[1, \d+\], the encoder takes"),
    ],
)
def test_weights_that_would_be_other_numbers_are_refused_by_name(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    from safetensors.torch import load_file, save_file

    folder = add_weights(picture_model(tmp_path))
    tensors = load_file(folder / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("modality_projection.proj.weight")]
    save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} {why}"):
        load_encoder(folder, torch.float32, torch.device("cpu"))


def test_a_model_without_pictures_has_no_encoder(tmp_path: Path) -> None:
    picture_model(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").unlink()
    assert load_encoder(tmp_path, torch.float32, torch.device("cpu")) is None
