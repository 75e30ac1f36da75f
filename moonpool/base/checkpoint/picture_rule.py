"""Whether an engine here can compute a checkpoint's pictures. Torch-free."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from moonpool.base.checkpoint.huggingface import folder_weights, read_header
from moonpool.base.checkpoint.tokenizer import Tokenizer
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.rule import read_rule

_PARTS = ("connector.", "multi_modal_projector.", "vision_model.", "vision_tower.", "visual.")
"""What the names of an encoder's tensors begin with, behind "model."."""
_PACKAGES = {"PIL": "Pillow", "transformers": "transformers"}


def engine_rule(folder: Path) -> PictureRule | str:
    """Return what a checkpoint makes of pictures; a text says why engines here take none."""
    rule = read_rule(folder, lambda: Tokenizer.load(folder))
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing and not isinstance(rule, str):
        return f"pictures need {' and '.join(missing)}, which are not installed"
    return rule


def encoder_elements(path: Path) -> int:
    """Count the numbers in the encoder that engines here load, from the files' headers; 0 = they load none.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if not path.is_dir() or isinstance(engine_rule(path), str):
        return 0
    headers = map(read_header, folder_weights(path))
    return sum(
        info.elements
        for header in headers
        for name, info in header.items()
        if name.removeprefix("model.").startswith(_PARTS)
    )
