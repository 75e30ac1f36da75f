"""The Hugging Face folder: its files, how it is put in place at once, and how it is read back."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import safetensors.torch
import torch
from tokenizers import Tokenizer

from tools.bundled_model.chat import CHAT_TEMPLATE
from tools.bundled_model.config import BOS, BOS_ID, CONTEXT, EOS, EOS_ID, PAD, PAD_ID, Shape
from tools.bundled_model.network import Llama

#: Bytes that the weights may have: the folder lies in the repository and in the wheel.
SIZE_LIMIT = 10_000_000

TOKENIZER_CONFIG: dict[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT,
    "padding_side": "left",
    "chat_template": CHAT_TEMPLATE,
}
GENERATION_CONFIG: dict[str, object] = {
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "do_sample": False,
}


class Folder:
    """The Hugging Face folder that the run writes."""

    def __init__(self, path: pathlib.Path, shape: Shape, tokenizer: Tokenizer) -> None:
        """Prepare to write to ``path``."""
        self.path = path
        self.shape = shape
        self.tokenizer = tokenizer

    @property
    def weights(self) -> pathlib.Path:
        """The file of the weights."""
        return self.path / "model.safetensors"

    def write(self, model: Llama, card: str) -> None:
        """Write all files beside the folder, then put the new folder in the old one's place.

        Raises:
            RuntimeError: the weights are larger than ``SIZE_LIMIT``; the old folder stays.
        """
        fresh = self.path.with_name(f".{self.path.name}.new")
        stale = self.path.with_name(f".{self.path.name}.old")
        for folder in (fresh, stale):
            shutil.rmtree(folder, ignore_errors=True)
        fresh.mkdir(parents=True)
        self._write_files(fresh, model, card)
        if self.path.exists():
            os.rename(self.path, stale)
        os.rename(fresh, self.path)
        shutil.rmtree(stale, ignore_errors=True)

    def _write_files(self, folder: pathlib.Path, model: Llama, card: str) -> None:
        weights = folder / self.weights.name
        state = {f"model.{k}": v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
        safetensors.torch.save_file(state, weights, metadata={"format": "pt"})
        weights.chmod(0o644)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "config.json", self.shape.config())
        _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
        _write_json(folder / "generation_config.json", GENERATION_CONFIG)
        (folder / "README.md").write_text(card, encoding="utf-8")
        size = weights.stat().st_size
        if size > SIZE_LIMIT:
            raise RuntimeError(f"model.safetensors has {size} bytes, more than {SIZE_LIMIT}")

    def load(self) -> Llama:
        """Return the saved model, its bfloat16 weights widened to float32."""
        model = Llama(self.shape)
        state = safetensors.torch.load_file(self.weights)
        model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
        return model.eval()


def _write_json(path: pathlib.Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
