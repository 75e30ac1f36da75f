"""The native code for slices, keys and reads, in `native`: one library, built like the kernels."""

import platform
from pathlib import Path

from kernels.native.build import ARCHITECTURES, BuildError, build

SOURCES = Path(__file__).parent / "native"


def library() -> Path:
    """Blocking. Where the library lies, built if need be; raises BuildError where it cannot be had."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise BuildError(f"none for this processor ({platform.machine()})")
    return build(architecture.targets[-1], SOURCES)  # the plainest: the C library and xxhash look at the processor
