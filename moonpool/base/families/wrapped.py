"""The text part of a model with further parts, such as for pictures or sound: its fields, and its tensors' names.

Such a model's config.json has the decoder's fields in `text_config`, whose `model_type` is a family's. The decoder's
tensors have the family's names behind one of four prefixes, whatever the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moonpool.base.errors import UnsupportedModel

WRAPPER = "ForConditionalGeneration"
"""End of the names of models with further parts that answer with text."""
TEXT_CONFIG = "text_config"
_OUTER_KEYS = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype")
"""Keys that count for the decoder even if only the whole model has them."""
_PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "",
    "text_model.": "",
}
"""What stands before the decoder's tensors, and what stands there in a model that is the decoder alone."""
_PLAIN = ("model.", "lm_head.")
"""What the decoder's tensors begin with in models that have the further parts beside the decoder, as Qwen2-VL."""
_REFUSED: Mapping[str, str] = {
    "paligemma": "tokens of its prompts attend to later tokens",
}
"""Models whose text part is not the family's, by `model_type`."""


def text_part(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the decoder's fields of config.json's `data`; None: the model has no further parts.

    Raises:
        UnsupportedModel: the text part is not a decoder as its `model_type` says; names `model_type`.
    """
    inner = data.get(TEXT_CONFIG)
    if inner is None and str(_only(data.get("architectures"))).endswith(WRAPPER):
        inner = data  # Qwen2-VL
    if not isinstance(inner, Mapping):
        return None
    if (why := _REFUSED.get(str(data.get("model_type")))) is not None:
        raise UnsupportedModel("model_type", f"{data['model_type']!r}: {why}")
    return {**{key: data[key] for key in _OUTER_KEYS if data.get(key) is not None}, **inner}


def decoder_names(stored: Iterable[str]) -> dict[str, str]:
    """Return the decoder's tensors among a whole model's `stored` names: the decoder's own names by the stored ones."""
    names = list(stored)
    found = {name: plain for name in names if (plain := _without_prefix(name)) is not None}
    begin = _PLAIN[1:] if found else _PLAIN
    return {**{name: name for name in names if name.startswith(begin)}, **found}


def wrapped_names(name: str) -> list[str]:
    """Return what models with further parts call the decoder's tensor or module `name`."""
    return [f"{prefix}{name.removeprefix(plain)}" for prefix, plain in _PREFIXES.items() if name.startswith(plain)]


def _only(names: object) -> object:
    return names[0] if isinstance(names, list) and len(names) == 1 else names


def _without_prefix(name: str) -> str | None:
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return None
