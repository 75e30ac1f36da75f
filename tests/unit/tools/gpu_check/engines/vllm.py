"""vLLM."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "1.2"
SamplingParams = SimpleNamespace
TokensPrompt = dict[str, Sequence[int]]


class LLM:
    """Answers sevens for a folder's model."""

    def __init__(self, model: str, *, enable_prefix_caching: bool, **settings: Any) -> None:
        if enable_prefix_caching or not (Path(model) / "config.json").exists():
            raise ValueError("nothing that can be compared")

    def generate(self, prompts: Sequence[TokensPrompt], sampling: SimpleNamespace, use_tqdm: bool) -> list[Any]:
        """As many tokens as are asked for."""
        made = SimpleNamespace(token_ids=[7] * sampling.max_tokens)
        return [SimpleNamespace(outputs=[made]) for _ in prompts]
