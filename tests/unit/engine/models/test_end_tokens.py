"""Which tokens end an answer: what the files say; texts count only where the files leave the ends open."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.config import ends_answer
from tests.unit.engine.models.quirks import fewer_tokens, generation, tokenizer_json

CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")


def folder_with(folder: Path, special: Sequence[str]) -> dict[str, int]:
    """Add special tokens to a folder. Returns their ids."""
    ids: dict[str, int] = {}

    def add(content: dict[str, Any]) -> None:
        fewer_tokens(content)
        for text in special:
            ids[text] = len(content["model"]["vocab"]) + len(ids)
            entry = {"id": ids[text], "content": text, "special": True, "single_word": False}
            content["added_tokens"].append({**entry, "lstrip": False, "rstrip": False, "normalized": False})

    tokenizer_json(add)(folder)
    return ids


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(checkpoint("tiny-llama"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("named", [True, False])
def test_gpt_oss_ends_with_return_and_call_only(folder: Path, *, named: bool) -> None:
    """Its `<|end|>` ends a message; also where no file names the ends."""
    ids = folder_with(folder, CHANNELS)
    if named:
        generation(eos_token_id=[ids["<|return|>"], ids["<|call|>"]])(folder)
    ends = load_config(folder).eos_token_ids
    assert {ids["<|return|>"], ids["<|call|>"]} <= set(ends)
    assert ids["<|end|>"] not in ends


def test_phi_ends_with_end(folder: Path) -> None:
    """Named among several, or by its text where one end or none is named."""
    ids = folder_with(folder, ("<|end|>", "<|im_end|>"))
    assert ids["<|end|>"] in load_config(folder).eos_token_ids
    own = json.loads((folder / "config.json").read_text())["eos_token_id"]
    generation(eos_token_id=[ids["<|end|>"], own])(folder)
    ends = load_config(folder).eos_token_ids
    assert ids["<|end|>"] in ends
    assert ids["<|im_end|>"] not in ends


def test_texts_that_end_answers() -> None:
    assert ends_answer(["<|end|>", "<|user|>"]) == {"<|end|>"}
    assert ends_answer(CHANNELS) == {"<|return|>", "<|call|>"}
    assert ends_answer(["<|call|>", "<|im_end|>"]) == {"<|im_end|>"}
