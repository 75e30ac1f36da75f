"""Memory that the C library keeps after it was freed, and when a process hands it back."""

from __future__ import annotations

import ctypes

REST_S = 20.0
"""How often a process looks whether it is at rest."""
REST_SHARE = 0.1
"""Share of a processor that a process at rest uses at most: handing memory back takes a processor and locks."""
KEPT_BYTES = 64 << 20
"""Memory beyond the least of all rests that a process keeps."""
LITTLE_BYTES = 8 << 20
"""Handing back less than this was in vain: what is held is in use. It is tried again once the process has worked."""


def release_memory() -> None:
    """Hand freed memory back to the system, if the C library can: a process keeps freed memory otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Tells when a process hands freed memory back: at rest, if it holds `KEPT_BYTES` more than at the least rest.

    A process that is kept from its processors looks as if at rest, while its memory is in use. So memory is handed back
    again at the next rests, until there is little to hand back.

    Args:
        processor_s: seconds of processor that the process has used so far.
        resident: bytes of memory that the process holds.
    """

    def __init__(self, processor_s: float, resident: float) -> None:
        self._processor_s, self._least = processor_s, resident
        self._before = resident
        """At the last look."""
        self._in_vain = False

    def is_due(self, processor_s: float, resident: float) -> bool:
        """Look `REST_S` after the last look. Call `handed_back` after memory was handed back."""
        at_rest = processor_s - self._processor_s < REST_SHARE * REST_S
        self._in_vain = self._in_vain and at_rest and resident < self._before + LITTLE_BYTES
        self._processor_s, self._before = processor_s, resident
        self._least = min(self._least, resident)
        return at_rest and not self._in_vain and resident > self._least + KEPT_BYTES

    def handed_back(self, resident: float) -> None:
        """Memory was handed back; so much is held still."""
        self._in_vain = resident > self._before - LITTLE_BYTES
        self._before = resident
        self._least = min(self._least, resident)
