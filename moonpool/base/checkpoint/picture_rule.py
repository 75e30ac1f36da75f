"""Whether an engine here can compute a checkpoint's pictures. Torch-free."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from moonpool.base.checkpoint.tokenizer import Tokenizer
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.rule import read_rule

_PACKAGES = {"PIL": "Pillow", "transformers": "transformers"}


def engine_rule(folder: Path) -> PictureRule | str:
    """Return what a checkpoint makes of pictures; a text says why engines here take none."""
    rule = read_rule(folder, lambda: Tokenizer.load(folder))
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing and not isinstance(rule, str):
        return f"pictures need {' and '.join(missing)}, which are not installed"
    return rule
