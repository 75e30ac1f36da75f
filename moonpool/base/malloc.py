"""Memory that the C library keeps after it was freed, and when a process hands it back."""

from __future__ import annotations

import ctypes

REST_S = 20.0
"""How often a process looks whether it is at rest."""
REST_SHARE = 0.1
"""Share of a processor that a process at rest uses at most: handing memory back takes a processor and locks."""
KEPT_BYTES = 64 << 20
"""Memory beyond that of the last rest that a process keeps."""


def release_memory() -> None:
    """Hand freed memory back to the system, if the C library can: a process keeps freed memory otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Tells when a process hands freed memory back: at rest, after a load that has left more than `KEPT_BYTES`.

    Args:
        processor_s: seconds of processor that the process has used so far.
        resident: bytes of memory that the process holds.
    """

    def __init__(self, processor_s: float, resident: float) -> None:
        self._processor_s, self._least = processor_s, resident

    def is_due(self, processor_s: float, resident: float) -> bool:
        """Look `REST_S` after the last look. Call `handed_back` after memory was handed back."""
        at_rest = processor_s - self._processor_s < REST_SHARE * REST_S
        self._processor_s = processor_s
        self._least = min(self._least, resident)
        return at_rest and resident > self._least + KEPT_BYTES

    def handed_back(self, resident: float) -> None:
        """Memory was handed back; what is held still is in use."""
        self._least = resident
