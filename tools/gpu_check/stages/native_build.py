"""The native kernels build with the compiler of this machine, and load."""

import time

from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 180
BESIDE_NEXT = True
"""The compiler needs no GPU."""


def check(where: Where, figures: Figures) -> None:
    """Build, or find what was built before, and load the library."""
    from moonpool.base.native.build import build, detect
    from moonpool.engine.kernels.native.library import Library

    figures["target"] = detect()
    began = time.monotonic()
    library = build(report=print)
    figures["build, s"] = round(time.monotonic() - began, 1)
    Library(library)


if __name__ == "__main__":
    stage_main("native_build", check)
