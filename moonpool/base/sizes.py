"""Sizes as people write them: 4GiB, 1.5GB, 4096."""

import re

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for kind, base in (("iB", 1024), ("B", 1000))
}
_BY_NAME = {name.lower(): factor for name, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: object) -> object:
    """A number of bytes from a text such as "4GiB", "1.5 GB" or "4096"; other values than text are returned unchanged.

    Raises:
        ValueError: the text is no size.
    """
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value)
    factor = _BY_NAME.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ValueError(f"must be a size in bytes, for example 4GiB, 500MB or 4096, got {value!r}")
    return round(float(found[1]) * factor) if "." in found[1] else int(found[1]) * factor


def size_option(text: str) -> int:
    """The same for a flag; raises ValueError."""
    size = parse_size(text)
    assert isinstance(size, int)
    return size


def format_size(size: int) -> str:
    """The shortest exact text of a size: 268435456 is "256MiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
