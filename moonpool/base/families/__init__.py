"""The model families that can be loaded. All other architectures are refused by name.

A family is a `ModelFamily` in any file of this folder.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import ModelFamily, TensorNames
from moonpool.base.families.deepseek import DEEPSEEK_V3
from moonpool.base.families.mixtral import MIXTRAL
from moonpool.base.families.other import other_family
from moonpool.base.families.wrapped import WRAPPER


def _found() -> Iterator[ModelFamily]:
    """Yield the families of this folder's files, by file."""
    for file in iter_modules(__path__, f"{__name__}."):
        yield from (found for found in vars(import_module(file.name)).values() if isinstance(found, ModelFamily))


_ALL = tuple({family.architecture: family for family in _found()}.values())
FAMILIES: Mapping[str, ModelFamily] = {
    name: family for family in _ALL for name in (family.architecture, *family.other_architectures)
}
"""By architecture, as config.json names the architecture."""

_BY_MODEL_TYPE = {name: family for family in _ALL for name in (family.model_type, *family.other_model_types)}
_BY_GGUF = {
    name: family
    for family in _ALL
    if family.gguf is not None and family not in (MIXTRAL, DEEPSEEK_V3)
    for name in (family.gguf.architecture, *family.gguf.other_architectures)
}


def family_of(declared: object, model_type: object) -> ModelFamily:
    """Return the family that config.json names in `architectures`, or else (None) in `model_type`.

    Of a model with further parts, the family is the text part's, and `model_type` the text part's. An architecture that
    is not described here, but is a decoder by its name, is computed by transformers' own code.

    Raises:
        UnsupportedModel: the family is not known; names the key.
    """
    if declared is None:
        if not isinstance(model_type, str) or model_type not in _BY_MODEL_TYPE:
            raise UnsupportedModel("model_type", f"{model_type!r} is none of {', '.join(_BY_MODEL_TYPE)}")
        return _BY_MODEL_TYPE[model_type]
    names = declared if isinstance(declared, list) else [declared]
    name = names[0] if len(names) == 1 else None
    text_family = _BY_MODEL_TYPE.get(str(model_type))
    if isinstance(name, str) and name.endswith(WRAPPER) and text_family is not None:
        return text_family
    family = FAMILIES.get(str(name)) or (other_family(name, model_type) if isinstance(name, str) else None)
    if family is None:
        raise UnsupportedModel("architectures", f"{declared!r} is no decoder, as {', '.join(FAMILIES)} are")
    return family


def names_of(architecture: str) -> TensorNames:
    """Return the names of a family's tensors; for an architecture that is not described here, the usual names."""
    family = FAMILIES.get(architecture)
    return TensorNames() if family is None else family.names


def gguf_family(name: object) -> ModelFamily:
    """Return the family for a GGUF file's `general.architecture` value.

    Raises:
        UnsupportedModel: the family is not known.
    """
    if not isinstance(name, str) or name not in _BY_GGUF:
        raise UnsupportedModel("general.architecture", f"{name!r} is none of {', '.join(_BY_GGUF)}")
    return _BY_GGUF[name]
