"""Hatchling's hook of all distributions: which of the repository's files each wheel holds.

`moonpool` is one import root that three wheels fill: no file is in two of them, and `tests/unit/deploy/test_wheels.py`
sees that none is left out. An editable install holds no file: the repository itself is imported.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

REPOSITORY = Path(__file__).parents[1]
SOURCES = {
    "moonpool-base": ("__init__.py", "py.typed", "base", "client", "v1"),
    "moonpool-kv": ("connectors",),
}
"""Distribution -> what it has of `moonpool/`; the distribution `moonpool` has the rest."""
KERNELS = {"moonpool": "engine", "moonpool-base": "kv"}
"""Distribution -> folder of C++ sources in `kernels/`."""
PREBUILT, TAG = "MOONPOOL_WHEEL_KERNELS", "MOONPOOL_WHEEL_TAG"
"""Variables that `tools/dist.py` sets for a platform wheel: folder with libraries by folder of sources, and the wheel's
tag. Without them a wheel fits every machine, and compiles native code where it is first used (ADR 88)."""


class Contents(BuildHookInterface):  # type: ignore[type-arg]
    """Adds a distribution's files to its wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        name = self.metadata.name
        held = {f"moonpool/{path}": f"moonpool/{path}" for path in SOURCES.get(name, ())}
        if name in KERNELS:
            held[f"kernels/{KERNELS[name]}"] = f"moonpool/kernels/{KERNELS[name]}"
        build_data["force_include"].update({str(REPOSITORY / path): inside for path, inside in held.items()})
        prebuilt = os.environ.get(PREBUILT)
        if prebuilt and name in KERNELS:
            libraries = Path(prebuilt) / KERNELS[name]
            build_data["force_include"][str(libraries)] = f"moonpool/kernels/{KERNELS[name]}/prebuilt"
            build_data.update(pure_python=False, tag=os.environ[TAG])
