"""Checkpoint configuration files as JSON objects with values read by type."""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from moonpool.base.errors import CheckpointError
from moonpool.base.json_parts import parse_json

MAX_COUNT = (1 << 31) - 1
"""Largest integer that a checkpoint's settings may have."""
MAX_COUNTS = {"num_hidden_layers": 1 << 12, "clip.vision.block_count": 1 << 12}
"""The same by name, where parts of the model are made one by one."""

MAX_SETTINGS_BYTES = 1 << 28
"""Largest file of a checkpoint that is read whole: settings, vocabularies, templates."""
_READ_WHOLE = frozenset({
    "adapter_config.json", "added_tokens.json", "chat_template.json", "config.json", "generation_config.json",
    "hf_quant_config.json", "model.safetensors.index.json", "modules.json", "preprocessor_config.json",
    "processor_config.json", "special_tokens_map.json", "tiktoken.model", "tokenizer.json", "tokenizer_config.json",
})  # fmt: skip
"""Names of such files. A folder may have others, of any size: nothing reads those."""
_TEMPLATES, _WEIGHTS = ".jinja", (".gguf", ".safetensors")


def check_files(folder: Path) -> None:
    """Check that what may be read in a checkpoint's folder, and in the folders there, are files of sensible size.

    A pipe would let its reader wait for ever, and a device or a file with holes may have no end.

    Raises:
        CheckpointError: names the file.
    """
    with suppress(OSError):  # whoever reads the folder says what is wrong
        for path in chain(folder.iterdir(), folder.glob("*/*")):
            if _is_read_whole(path) or path.suffix in _WEIGHTS:
                check_file(path)


def check_file(path: Path) -> None:
    """Check a file of a checkpoint; see `check_files`. One that is missing, and a folder, is left to the reader.

    Raises:
        CheckpointError: names the file.
    """
    with suppress(OSError):
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise CheckpointError(f"{path}: is a pipe, a socket or a device, not a file")
        if _is_read_whole(path) and found.st_size > MAX_SETTINGS_BYTES:
            raise CheckpointError(f"{path}: has {found.st_size} bytes, more than {MAX_SETTINGS_BYTES}")


def _is_read_whole(path: Path) -> bool:
    return path.name in _READ_WHOLE or path.suffix == _TEMPLATES


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
