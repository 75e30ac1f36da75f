"""SGLang."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__version__ = "3.4"


class Engine:
    """Answers sevens for a folder's model."""

    def __init__(self, model_path: str, *, disable_radix_cache: bool, **settings: Any) -> None:
        if not disable_radix_cache or not (Path(model_path) / "config.json").exists():
            raise ValueError("nothing that can be compared")

    def generate(self, input_ids: Sequence[Sequence[int]], sampling_params: dict[str, Any]) -> list[Any]:
        """As many tokens as are asked for."""
        return [{"output_ids": [7] * sampling_params["max_new_tokens"]} for _ in input_ids]
