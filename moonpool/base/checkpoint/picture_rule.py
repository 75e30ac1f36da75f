"""What a checkpoint makes of pictures, and whether an engine here can compute them. Torch-free."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from moonpool.base.checkpoint.gguf import is_gguf
from moonpool.base.checkpoint.huggingface import folder_weights, read_header
from moonpool.base.checkpoint.mmproj import mmproj_elements, mmproj_settings
from moonpool.base.checkpoint.tokenizer import Tokenizer
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import read_json
from moonpool.base.pictures.base import PictureRule, PictureTokenizer
from moonpool.base.pictures.rule import NO_ENCODER, PictureSettings, check_kind, processor_settings, rule_of

_PARTS = ("connector.", "multi_modal_projector.", "vision_model.", "vision_tower.", "visual.")
"""What the names of an encoder's tensors begin with, behind "model."."""
_PACKAGES = {"PIL": "Pillow", "transformers": "transformers"}


def picture_settings(path: Path) -> PictureSettings:
    """Return what a folder says of pictures, or the part for pictures beside a GGUF file.

    Raises:
        CheckpointError: there is no encoder, or a file is missing or damaged.
        UnsupportedModel: the encoder is not built.
    """
    if is_gguf(path):
        return mmproj_settings(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(NO_ENCODER)
    config = read_json(path / "config.json")
    check_kind(config)
    return PictureSettings(config, processor_settings(path))


def read_rule(path: Path, tokenizer: Callable[[], PictureTokenizer]) -> PictureRule | str:
    """Return a checkpoint's rule; a text says why there is none. `tokenizer` loads the tokenizer, if need be."""
    try:
        settings = picture_settings(path)
        return rule_of(settings, tokenizer(), str(path))
    except (CheckpointError, UnsupportedModel) as error:
        return str(error)


def engine_rule(path: Path) -> PictureRule | str:
    """Return what a checkpoint makes of pictures; a text says why engines here take none."""
    rule = read_rule(path, lambda: Tokenizer.load(path))
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing and not isinstance(rule, str):
        return f"pictures need {' and '.join(missing)}, which are not installed"
    return rule


def encoder_elements(path: Path) -> int:
    """Count the numbers in the encoder that engines here load, from the files' headers; 0 = they load none.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if isinstance(engine_rule(path), str):
        return 0
    if is_gguf(path):
        return mmproj_elements(path)
    headers = map(read_header, folder_weights(path))
    return sum(
        info.elements
        for header in headers
        for name, info in header.items()
        if name.removeprefix("model.").startswith(_PARTS)
    )
