"""Memory for weights: on large pages if the system gives them, as every step reads a weight in whole.

Measured, a decode step over 0.5 billion weights takes 1.1 to 1.2 times as long on pages of 4 KiB. Weights that engines
of a host share, or that are larger than memory, lie in a file that is mapped (`moonpool.base.checkpoint.weight_file`):
the system holds each page once, drops parts where memory is short, and reads them again.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from moonpool.base.checkpoint.weight_file import WeightFile, advise_large_pages

#: Of x86-64 and AArch64; a chunk begins at a multiple of it.
LARGE_PAGE = 2 << 20
#: What is mapped at a time; what is never written to takes no memory.
CHUNK = 32 << 20
#: The same of files, of which each mapping holds a descriptor.
FILE_CHUNK = 1 << 30
#: Of a cache line; each piece begins at a multiple of it.
LINE = 64


class WeightArena:
    """Gives pieces of memory that stay as long as a tensor refers to their chunk.

    `file`: holds the pieces; None: they are in memory. In a whole file, the same pieces in the same order have the
    content that the file's writer gave them, and must not be written to.
    """

    def __init__(self, file: WeightFile | None = None) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._file = file
        self._mapped = self._used = self._taken = 0  # bytes of the file that are mapped, behind given pieces; of pieces
        self._records: list[Any] = []
        self.whole = file is not None and file.notes is not None
        """Whether pieces have their content."""
        if file is not None and file.notes is not None:
            self._records = list(reversed(file.notes["records"]))

    @property
    def mapped_bytes(self) -> int:
        """Bytes in the file; 0: pieces are in memory."""
        return 0 if self._file is None else self._taken

    def take(self, nbytes: int) -> Tensor:
        """Return `nbytes` of memory, uint8, without other references.

        Raises:
            OSError: there is no memory, or no room in the folder.
        """
        size = -(-nbytes // LINE) * LINE
        if size > self._chunk.numel():
            self._chunk = mapped(max(size, CHUNK)) if self._file is None else self._next_part(self._file, size)
        if self._file is not None and not self.whole:
            self._file.allocate(self._used, size)
        self._used += size
        self._taken += size
        piece, self._chunk = self._chunk[:nbytes], self._chunk[size:]
        return piece

    def record(self, what: Any) -> None:
        """Tell later users of a file, in the order of calls, what JSON holds of a piece."""
        if self._file is not None and not self.whole:
            self._records.append(what)

    def recorded(self) -> Any:
        """Return what the writer of a whole file said at this call."""
        assert self.whole
        return self._records.pop()

    def finish(self, note: str) -> str:
        """All pieces have their content; return `note`, or the writer's of a whole file."""
        if self._file is None:
            return note
        if self._file.notes is not None:
            found: str = self._file.notes["note"]
            return found
        self._file.finish({"records": self._records, "note": note})
        return note

    def _next_part(self, file: WeightFile, size: int) -> Tensor:
        """Map the file's next part, of `size` bytes at least."""
        self._used = self._mapped
        self._mapped += -(-max(size, FILE_CHUNK) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if not self.whole:
            os.ftruncate(file.descriptor, self._mapped)
        part = mmap.mmap(file.descriptor, self._mapped - self._used, flags=mmap.MAP_SHARED, offset=self._used)
        advise_large_pages(part)  # before the first access, which makes the file system read large parts
        return torch.frombuffer(part, dtype=torch.uint8)


def mapped(nbytes: int) -> Tensor:
    """Return fresh memory, uint8 [nbytes], that begins at a large page and goes back to the system with the tensor.

    What goes through the allocator instead leaves holes: 0.4 GB after loading a model of 1 GB.
    """
    fresh = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_large_pages(fresh)
    memory = torch.frombuffer(fresh, dtype=torch.uint8)
    begin = -memory.data_ptr() % LARGE_PAGE
    return memory[begin : begin + nbytes]
