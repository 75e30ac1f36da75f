"""What a checkpoint makes of pictures: their tokens, from width and height alone.

A rule is a class beside `Idefics3Rule`, and a line in `_RULES`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.base.errors import CheckpointError, InvalidRequest
from moonpool.base.families.fields import read_json
from moonpool.base.kv.media import MediaItem, media_digest
from moonpool.base.pictures.base import PictureFields, PictureRule, PictureTokenizer
from moonpool.base.pictures.files import Picture
from moonpool.base.pictures.gemma3 import Gemma3Rule
from moonpool.base.pictures.idefics3 import Idefics3Rule
from moonpool.base.pictures.internvl import InternVLRule
from moonpool.base.pictures.limits import DETAILS, MAX_BYTES, MAX_PICTURES, MAX_PIXELS, MAX_TOGETHER_BYTES
from moonpool.base.pictures.pixtral import PixtralRule
from moonpool.base.pictures.qwen2_vl import Qwen2VLRule

_RULES: Mapping[str, Callable[[PictureFields], PictureRule]] = {
    "gemma3": Gemma3Rule.read,
    "idefics3": Idefics3Rule.read,
    "internvl": InternVLRule.read,
    "mistral3": PixtralRule.read,
    "qwen2_5_vl": Qwen2VLRule.read,
    "qwen2_vl": Qwen2VLRule.read,
    "qwen3_5": Qwen2VLRule.read,
    "qwen3_5_moe": Qwen2VLRule.read,
    "qwen3_vl": Qwen2VLRule.read,
    "qwen3_vl_moe": Qwen2VLRule.read,
    "smolvlm": Idefics3Rule.read,
}
"""By `model_type`."""
NO_ENCODER = "the checkpoint has no encoder of pictures"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class PictureSettings:
    """What a checkpoint says of pictures.

    Attributes:
        config: as config.json has it.
        processor: the processor's settings, as a folder has them.
        weights: a hash of the encoder's file, if the file is none of the model's; it counts in digests.
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    weights: str = ""


def check_kind(config: Mapping[str, Any]) -> None:
    """Check that config.json is of a model whose pictures are built.

    Raises:
        CheckpointError: there is no encoder, or pictures of this model are not built; says which are.
    """
    if "vision_config" not in config:
        raise CheckpointError(NO_ENCODER)
    kind = str(config.get("model_type"))
    if kind not in _RULES:
        raise CheckpointError(f"pictures of {kind!r} are not built; {', '.join(_RULES)} are")


def rule_of(settings: PictureSettings, tokenizer: PictureTokenizer, source: str) -> PictureRule:
    """Return the rule of a checkpoint whose kind has been checked; `source` names the checkpoint in errors.

    Raises:
        CheckpointError: a setting is wrong; names the setting.
        UnsupportedModel: settings contradict each other, or a token is missing; names the setting.
    """
    fields = PictureFields(settings.config, settings.processor, tokenizer, source, settings.weights)
    return _RULES[fields.kind](fields)


def processor_settings(folder: Path) -> Mapping[str, Any]:
    """Return the processor's settings: those of pictures, and `image_seq_len`, wherever the folder has them.

    Raises:
        CheckpointError: the files are missing or damaged.
    """
    found: dict[str, Any] = {}
    files = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    if not files:
        raise CheckpointError(f"{folder}: no {' or '.join(_PROCESSOR_FILES)} in this folder")
    for file in files:
        data = read_json(file)
        found |= {**data, **(data.get("image_processor") or {})}
    return found


def check_pictures(field: str, pictures: Sequence[Picture]) -> None:
    """Check number, sizes and words of a prompt's pictures.

    Raises:
        InvalidRequest: names `field`.
    """
    if len(pictures) > MAX_PICTURES:
        raise InvalidRequest(field, f"{len(pictures)} pictures, at most {MAX_PICTURES} are allowed")
    together = sum(len(picture.content) for picture in pictures)
    if together > MAX_TOGETHER_BYTES:
        raise InvalidRequest(
            field, f"the pictures have {together} bytes together, at most {MAX_TOGETHER_BYTES} are allowed"
        )
    for picture in pictures:
        if not 0 < len(picture.content) <= MAX_BYTES:
            raise InvalidRequest(field, f"a picture has {len(picture.content)} bytes, 1 to {MAX_BYTES} are allowed")
        if not (picture.width > 0 and picture.height > 0 and picture.width * picture.height <= MAX_PIXELS):
            raise InvalidRequest(
                field, f"a picture of {picture.width} x {picture.height} pixels, 1 to {MAX_PIXELS} are allowed"
            )
        if picture.detail not in DETAILS:
            raise InvalidRequest(field, f"detail must be one of {', '.join(DETAILS[1:])}, not {picture.detail!r}")


def grid_of(field: str, rule: PictureRule, picture: Picture) -> tuple[int, ...]:
    """Return how a picture is cut.

    Raises:
        InvalidRequest: the model cannot take a picture of this shape; names `field`.
    """
    try:
        return rule.grid(picture.width, picture.height, picture.detail)
    except ValueError as error:
        raise InvalidRequest(field, f"a picture of {error}") from None


def with_pictures(
    field: str, rule: PictureRule, tokens: Sequence[int], pictures: Sequence[Picture]
) -> tuple[array[int], tuple[MediaItem, ...]]:
    """Return the prompt with each picture's tokens in place of the template's mark, and where they are.

    Raises:
        InvalidRequest: the template has not written one mark for each picture; names `field`.
    """
    marks = sum(token == rule.mark for token in tokens)
    if marks != len(pictures):
        raise InvalidRequest(field, f"the chat template shows {marks} of {len(pictures)} pictures")
    found, media, waiting = array("i"), list[MediaItem](), iter(pictures)
    for token in tokens:
        if token != rule.mark:
            found.append(token)
            continue
        picture, begin = next(waiting), len(found)
        grid = grid_of(field, rule, picture)
        found.extend(rule.tokens(grid))
        digest = media_digest(picture.content, (picture.width, picture.height, picture.detail, grid, rule.settings))
        media.append(
            MediaItem(begin, len(found), digest, picture.content, picture.width, picture.height, picture.detail)
        )
    return found, tuple(media)
