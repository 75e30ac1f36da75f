"""Runs at the start of every process of an SGLang on the CPU: what it imports for GPUs and images is an empty module.

Python imports this module by itself from PYTHONPATH. None of the stubs is called for text on a CPU.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

from transformers.utils import import_utils

STUBS = ("flashinfer", "sgl_kernel", "torchcodec", "torchvision")
for ask in (import_utils.is_torchvision_available, import_utils.is_torchcodec_available):
    ask()  # transformers shall remember that they are missing


class Stubs(MetaPathFinder, Loader):
    """Finds modules of which every name is there and does nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a stub; None for all other modules."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in STUBS else None

    def exec_module(self, module: ModuleType) -> None:
        """Gives a stub its names."""

        def name(wanted: str) -> MagicMock:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return MagicMock(name=f"{module.__name__}.{wanted}")

        module.__version__ = "0.0"  # type: ignore[attr-defined]
        module.__getattr__ = name  # type: ignore[method-assign]


sys.meta_path.insert(0, Stubs())
