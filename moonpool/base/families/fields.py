"""Checkpoint configuration files as JSON objects with values read by type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.base.errors import CheckpointError
from moonpool.base.json_parts import parse_json

MAX_COUNT = (1 << 31) - 1
"""Largest integer that a checkpoint's settings may have."""
MAX_COUNTS = {"num_hidden_layers": 1 << 12, "clip.vision.block_count": 1 << 12}
"""The same by name, where parts of the model are made one by one."""


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name} in this folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return data


class JsonFields:
    """A JSON object with values read by type; `source` names the origin in errors."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self._data = data
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        """Return the raw value."""
        return self._data.get(name, default)

    def all(self) -> Mapping[str, Any]:
        """Return all raw values."""
        return self._data

    def positive(self, name: str, default: int | None = None, *, null: int | None = None) -> int:
        """Return a positive integer; `default` if absent, `null` (else `default`) if null."""
        value = self._present(name, default, null)
        if type(value) is not int or value <= 0:
            raise CheckpointError(f"{self.source}: {name} must be a positive integer, not {value!r}")
        most = MAX_COUNTS.get(name, MAX_COUNT)
        if value > most:
            raise CheckpointError(f"{self.source}: {name} is {value}, more than {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; `default` when absent or null."""
        value = self._present(name, default, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.source}: {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; `default` when absent or null."""
        value = self._present(name, default, None)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {name} must be true or false, not {value!r}")
        return value

    def _present(self, name: str, default: Any, null: Any) -> Any:
        value = self._data.get(name)
        if value is None and name in self._data and null is not None:
            return null
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        return value
