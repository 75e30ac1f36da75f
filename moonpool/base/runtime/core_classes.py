"""The classes of which a core's state and events consist: the only ones that a journal may name."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType, ModuleType

from moonpool.base.runtime.core_codec import class_name, is_record

CORE_MODULES = (
    "moonpool.base.kv.blocks",
    "moonpool.base.kv.delete_kv",
    "moonpool.base.kv.keys",
    "moonpool.base.kv.layout",
    "moonpool.base.kv.media",
    "moonpool.base.logprobs",
    "moonpool.base.sampling_params",
    "moonpool.base.scheduling",
    "moonpool.conductor.core",
    "moonpool.conductor.placement",
    "moonpool.engine.decode.core",
    "moonpool.engine.prefill.core",
    "moonpool.engine.scheduler",
)
"""Modules, and packages with all below them. What is not installed is left out."""


@lru_cache
def core_classes(further: Sequence[str] = ()) -> Mapping[str, type]:
    """Return the classes by name.

    Args:
        further: modules of somebody's own policies. Whoever names them trusts them: their code runs.

    Raises:
        ImportError: a further module cannot be imported.
    """
    found: dict[str, type] = {}
    for name in CORE_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # the base alone is installed
            continue
        for part in _with_all_below(module):
            found.update(_classes_of(part))
    for name in further:
        found.update(_classes_of(importlib.import_module(name)))
    return MappingProxyType(found)


def _with_all_below(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
        yield importlib.import_module(info.name)


def _classes_of(module: ModuleType) -> Iterator[tuple[str, type]]:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and is_record(value):
            yield class_name(value), value
