"""The model families that can be loaded. All other architectures are refused by name."""

from collections.abc import Mapping

from moonpool.checkpoint.families.base import ModelFamily
from moonpool.checkpoint.families.llama import LLAMA
from moonpool.checkpoint.families.mistral import MISTRAL
from moonpool.checkpoint.families.qwen2 import QWEN2
from moonpool.checkpoint.families.qwen3 import QWEN3
from moonpool.errors import UnsupportedModel

FAMILIES: Mapping[str, ModelFamily] = {it.architecture: it for it in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""By architecture, as config.json names it."""

_BY_MODEL_TYPE = {it.model_type: it for it in FAMILIES.values()}
_BY_GGUF = {it.gguf.architecture: it for it in FAMILIES.values() if it.gguf is not None}


def family_of(declared: object, model_type: object) -> ModelFamily:
    """Return the family that config.json names in `architectures`, or else (None) in `model_type`.

    Raises:
        UnsupportedModel: the family is not known; names the key.
    """
    if declared is None:
        if not isinstance(model_type, str) or model_type not in _BY_MODEL_TYPE:
            raise UnsupportedModel("model_type", f"{model_type!r} is none of {', '.join(_BY_MODEL_TYPE)}")
        return _BY_MODEL_TYPE[model_type]
    names = declared if isinstance(declared, list) else [declared]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise UnsupportedModel("architectures", f"{declared!r} is none of {', '.join(FAMILIES)}")
    return FAMILIES[str(names[0])]


def gguf_family(name: object) -> ModelFamily:
    """Return the family of the value of `general.architecture` in a GGUF file.

    Raises:
        UnsupportedModel: the family is not known.
    """
    if not isinstance(name, str) or name not in _BY_GGUF:
        raise UnsupportedModel("general.architecture", f"{name!r} is none of {', '.join(_BY_GGUF)}")
    return _BY_GGUF[name]
