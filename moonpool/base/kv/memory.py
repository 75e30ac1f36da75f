"""How much memory this machine or container has left, for pools."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def shared_memory() -> int:
    """A descriptor for empty memory without a name: a memfd, else an unlinked temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("moonpool-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, name = tempfile.mkstemp(prefix="moonpool-kv-")
    Path(name).unlink()
    return fd


def available_bytes(system: Path = Path("/")) -> int | None:
    """Memory that the system or our control group can still give; None if unknown.

    File pages count as free: the group counts them as used, and the system drops them when memory is needed.
    `system`: folder in which `proc` and `sys` lie.
    """
    found: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        found.append(_numbers(system / "proc/meminfo")["MemAvailable:"] << 10)
    group = system / "sys/fs/cgroup"
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        pages = _numbers(group / "memory.stat")
        found.append(max(0, limit - used + pages["active_file"] + pages["inactive_file"]))
    return min(found, default=None)


def _numbers(table: Path) -> dict[str, int]:
    """The second word of each line, by the first."""
    return {words[0]: int(words[1]) for words in map(str.split, table.read_text().splitlines()) if len(words) > 1}
