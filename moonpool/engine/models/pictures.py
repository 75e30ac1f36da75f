"""Encoders of pictures: transformers' own tower of a family, with the checkpoint's weights; no code of the checkpoint.

Rows of a picture are kept by its digest: a picture that comes again, or that lies in several chunks of a prompt, is
encoded once. Rows may come with a step instead, from a kvstore.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moonpool.base.checkpoint.picture_rule import engine_rule, picture_settings
from moonpool.base.errors import CheckpointError
from moonpool.base.kv.media import MediaItem, overlapping
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.file_process import decode
from moonpool.base.pictures.limits import ROWS_BYTES
from moonpool.base.pictures.pixtral import PixtralRule
from moonpool.base.pictures.qwen2_vl import Qwen2VLRule
from moonpool.base.scheduling.steps import ENCODER, MEMORY, STORE, PlacedPicture, SequenceStep
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.picture_weights import fill

SQUARES_TOGETHER = 4
"""Squares of a picture that are encoded at once, which bounds the memory of the encoder's states."""
_Inputs = Iterator[dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class _Tower:
    """What transformers calls the parts of a family.

    Attributes:
        parts: modules of the encoder.
        text: module of the decoder.
        processor: class of the processor.
        inputs: from processor, pixels, and the rule and detail of a picture to the encoder's inputs, call by call.
    """

    parts: tuple[str, ...]
    text: str
    processor: str
    inputs: Callable[[Any, Any, PictureRule, str], _Inputs]


def _squares(processor: Any, image: Any, rule: PictureRule, detail: str) -> _Inputs:
    del rule
    given = {"do_image_splitting": False} if detail == "low" else {}
    made = processor([[image]], return_tensors="pt", **given)
    names = "pixel_values", "pixel_attention_mask"
    for parts in zip(*(made[name].split(SQUARES_TOGETHER, 1) for name in names), strict=True):
        yield dict(zip(names, parts, strict=True))


def _cells(processor: Any, image: Any, rule: PictureRule, detail: str) -> _Inputs:
    assert isinstance(rule, PixtralRule)
    size = {"longest_edge": rule.longest_side(detail)}
    made = processor([image], return_tensors="pt", patch_size=rule.cell, size=size)
    yield {name: made[name] for name in ("pixel_values", "image_sizes")}


def _arranged(processor: Any, image: Any, rule: PictureRule, detail: str) -> _Inputs:
    del rule
    made = processor([image], return_tensors="pt", crop_to_patches=detail != "low")
    for pixels in made["pixel_values"].split(SQUARES_TOGETHER):
        yield {"pixel_values": pixels}


def _square(processor: Any, image: Any, rule: PictureRule, detail: str) -> _Inputs:
    del rule, detail
    yield {"pixel_values": processor([image], return_tensors="pt")["pixel_values"]}


def _patches(processor: Any, image: Any, rule: PictureRule, detail: str) -> _Inputs:
    assert isinstance(rule, Qwen2VLRule)
    size = {"shortest_edge": rule.fewest, "longest_edge": rule.most_pixels(detail)}
    made = processor([image], return_tensors="pt", size=size)
    yield {name: made[name] for name in ("pixel_values", "image_grid_thw")}


_PARTS = "vision_model", "connector"
_LATER_PARTS = "vision_tower", "multi_modal_projector"
_TOWERS = {
    "gemma3": _Tower(_LATER_PARTS, "language_model", "Gemma3ImageProcessorPil", _square),
    "idefics3": _Tower(_PARTS, "text_model", "Idefics3ImageProcessorPil", _squares),
    "internvl": _Tower(_LATER_PARTS, "language_model", "GotOcr2ImageProcessorPil", _arranged),
    "mistral3": _Tower(_LATER_PARTS, "language_model", "PixtralImageProcessorPil", _cells),
    **{
        f"qwen{name}": _Tower(("visual",), "language_model", "Qwen2VLImageProcessorPil", _patches)
        for name in ("2_5_vl", "2_vl", "3_5", "3_5_moe", "3_vl", "3_vl_moe")
    },
    "smolvlm": _Tower(_PARTS, "text_model", "SmolVLMImageProcessorPil", _squares),
}
"""By `model_type`."""


class PicturePositions:
    """M-RoPE's positions of pictures, which all stages of a model need.

    Attributes:
        components: by which of a token's positions each pair of elements turns, [head_dim / 2] int64.
    """

    def __init__(self, rule: PictureRule) -> None:
        self._rule = rule
        self.components = torch.tensor(rule.components, dtype=torch.int64)

    def set_positions(self, batch: PackedBatch, sequences: Sequence[SequenceStep]) -> None:
        """Give a batch on the host the positions by which RoPE turns.

        Args:
            batch: changed.
            sequences: the batch's, in the order of their rows.
        """
        positions, shifts, first = batch.positions.repeat(3, 1), list[int](), 0
        for sequence in sequences:
            count = len(sequence.token_ids) // 4
            end, shift = sequence.start + count, sequence.rope_shift
            positions[:, first : first + count] += shift
            for item in overlapping(sequence.media, sequence.start, end):
                rows, columns = self._rule.grid(item.width, item.height, item.detail)
                own = torch.zeros(3, rows, columns, dtype=torch.int64)
                own[1], own[2] = torch.arange(rows)[:, None], torch.arange(columns)
                own = own.flatten(1) + item.begin + shift
                begin, last = max(item.begin, sequence.start), min(item.end, end)
                at = first + begin - sequence.start
                positions[:, at : at + last - begin] = own[:, begin - item.begin : last - item.begin]
                if item.end <= end:
                    change = max(rows, columns) - rows * columns
                    positions[:, first + item.end - sequence.start : first + count] += change
                    shift += change
            shifts.append(shift)
            first += count
        batch.rope_positions, batch.rope_shifts = positions, torch.tensor(shifts)
        if not any(sequence.media for sequence in sequences):
            batch.rope_positions = positions[0].contiguous()


class PictureEncoder:
    """The encoder of one model.

    Args:
        rule: what the model makes of pictures.
        tower: a model of transformers with `get_image_features`, without a decoder.
        inputs: makes the tower's inputs of pixels and the detail, call by call.
        device: where the tower is.
        width: elements of one of the decoder's rows.
    """

    def __init__(
        self, rule: PictureRule, tower: Any, inputs: Callable[[Any, str], _Inputs], device: torch.device, width: int
    ) -> None:
        self._rule, self._tower, self._inputs, self._device = rule, tower, inputs, device
        self._row_bytes = (1 + rule.added_layers) * width * tower.dtype.itemsize
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._rows_bytes = 0
        self._placed: list[PlacedPicture] = []
        self.encoded = 0
        """Pictures encoded so far."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return sum(weight.nbytes for weight in self._tower.parameters())

    @in_inference_mode
    def place(self, hidden: Tensor, sequences: Sequence[SequenceStep], batch: PackedBatch) -> None:
        """Put rows of pictures in place of the marks' embeddings, and further rows for later layers into the batch.

        Args:
            hidden: embeddings of all tokens of a step, [T, hidden]; changed.
            sequences: the step's, in the order of their rows.
            batch: the step's; changed.

        Raises:
            CheckpointError: a picture cannot be encoded. Requests with such pictures are refused before.
        """
        first, placed = 0, list[tuple[Tensor, Tensor]]()
        for index, sequence in enumerate(sequences):
            count = len(sequence.token_ids) // 4
            end = sequence.start + count
            for item in overlapping(sequence.media, sequence.start, end):
                begin = max(item.begin, sequence.start)
                began_ns, given = time.monotonic_ns(), sequence.picture_rows.get(item.digest)
                (rows, source), marks = self._found(item, given or b""), self._marks(item)
                if source != MEMORY or item.begin >= sequence.start:
                    wanted = packed_rows(rows) if given == b"" and source == ENCODER else b""
                    ns = time.monotonic_ns() - began_ns
                    placed_here = PlacedPicture(index, item.end - item.begin, source, ns, item.digest, wanted)
                    self._placed.append(placed_here)
                seen = marks[: begin - item.begin].sum()
                here = marks[begin - item.begin : min(item.end, end) - item.begin]
                at = first + begin - sequence.start + here.nonzero().flatten()
                placed.append((at, rows[seen : seen + here.sum()]))
            first += count
        at, rows = (torch.cat(parts).to(hidden.device) for parts in zip(*placed, strict=True))
        own, *further = torch.split(rows, hidden.shape[1], 1)
        hidden[at] = own
        batch.added = [(at, values) for values in further]

    def take_placed(self) -> tuple[PlacedPicture, ...]:
        """Return the pictures of which rows were placed since the last call: encoded, or begun from known rows."""
        placed, self._placed = tuple(self._placed), []
        return placed

    def rows(self, item: MediaItem) -> Tensor:
        """Return a picture's rows [n, k hidden], for its marks in their order; behind the first, those of later layers.

        Raises:
            CheckpointError: the picture cannot be encoded.
        """
        return self._found(item, b"")[0]

    def _found(self, item: MediaItem, given: bytes) -> tuple[Tensor, str]:
        """Return a picture's rows and their source; `given` rows are taken if their size is right. Raises as `rows`."""
        if (known := self._rows.get(item.digest)) is not None:
            self._rows.move_to_end(item.digest)
            return known, MEMORY
        wanted, source = int(self._marks(item).sum()), STORE
        found = self._unpacked(given, wanted)
        if found is None:
            found, source = self._encoded(item), ENCODER
            if found.shape[0] != wanted:
                raise CheckpointError(f"the encoder makes {found.shape[0]} rows of a picture, not {wanted}")
            self.encoded += 1
        self._rows[item.digest] = found
        self._rows_bytes += found.nbytes
        while self._rows_bytes > ROWS_BYTES and len(self._rows) > 1:
            _, dropped = self._rows.popitem(last=False)
            self._rows_bytes -= dropped.nbytes
        return found, source

    def _unpacked(self, given: bytes, rows: int) -> Tensor | None:
        """Return the rows that `packed_rows` has packed; None if they are not of this encoder's size."""
        dtype: torch.dtype = self._tower.dtype
        if not given or len(given) != rows * self._row_bytes:
            return None
        return torch.frombuffer(bytearray(given), dtype=dtype).reshape(rows, -1).to(self._device)

    def _marks(self, item: MediaItem) -> Tensor:
        """Return which of a picture's tokens are marks, [end - begin] bool."""
        grid = self._rule.grid(item.width, item.height, item.detail)
        return torch.tensor(self._rule.tokens(grid)) == self._rule.mark

    def _encoded(self, item: MediaItem) -> Tensor:
        found: list[Tensor] = []
        for inputs in self._inputs(decode(item.content), item.detail):
            moved = {name: value.to(self._device) for name, value in inputs.items()}
            pixels = moved.pop("pixel_values").to(self._tower.dtype)
            made = self._tower.get_image_features(pixels, **moved, return_dict=True)
            further = getattr(made, "deepstack_features", None) or ()
            found += [torch.cat(each, 1) for each in zip(made.pooler_output, *further, strict=True)]
        return torch.cat(found)


def packed_rows(rows: Tensor) -> bytes:
    """Return rows of a picture as bytes, row by row."""
    return rows.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def picture_positions(path: Path) -> PicturePositions | None:
    """Return the positions of a checkpoint's pictures; None: tokens of pictures turn by their place, as others."""
    rule = engine_rule(path)
    return None if isinstance(rule, str) or not rule.components else PicturePositions(rule)


def load_encoder(path: Path, dtype: torch.dtype, device: torch.device) -> PictureEncoder | None:
    """Load the encoder of a checkpoint; None: the model takes no pictures here (`engine_rule`).

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    rule = engine_rule(path)
    if isinstance(rule, str):
        return None
    import transformers

    settings = picture_settings(path)
    config: Any = transformers.CONFIG_MAPPING[settings.config["model_type"]].from_dict(dict(settings.config))
    # Of the decoder, which is Moonpool's own, nothing is made but an empty shell.
    config.text_config.num_hidden_layers, config.text_config.vocab_size = 0, 1
    config.text_config.pad_token_id = None
    family, auto = _TOWERS[config.model_type], cast("Any", transformers.AutoModel)
    tower: Any = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    setattr(tower, family.text, nn.Module())
    stacked = getattr(config.vision_config, "deepstack_visual_indexes", [])
    fill(path, {name: getattr(tower, name) for name in family.parts}, stacked)
    tower.to(device).train(False)
    processor: Any = getattr(transformers, family.processor).from_dict(dict(settings.processor))

    def inputs(image: Any, detail: str) -> _Inputs:
        return family.inputs(processor, image, rule, detail)

    return PictureEncoder(rule, tower, inputs, device, config.text_config.hidden_size)
