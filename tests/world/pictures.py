"""A judge of answers about pictures: those of transformers. Prompts of text alone are judged as any."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Message
from tests.pictures import PictureReference
from tests.world.plain import PlainJudge

GAP = 1e-3
"""Of logits near 5, in float32: sums that are rounded in another order may choose between these."""


class PictureJudge(PlainJudge):
    """Teacher-forced, by transformers where a prompt has pictures."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._reference = PictureReference(checkpoint)
        self._mark: int = self._reference.model.config.image_token_id
        self._inputs: dict[tuple[int, ...], Any] = {}

    def picture_prompt(self, chat: Sequence[Message]) -> list[int]:
        files = [part["picture"].content for turn in chat for part in turn.get("parts", ()) if "picture" in part]
        inputs = self._reference.inputs(self._reference.text_of(chat), files)
        numbers = [
            -int.from_bytes(hashlib.sha256(file).digest()[:6]) - 1 for file in files for _ in range(self._rows(file))
        ]
        rows = iter(numbers)
        prompt = [next(rows) if token == self._mark else token for token in inputs["input_ids"][0].tolist()]
        assert next(rows, None) is None
        self._inputs[tuple(prompt)] = inputs
        return prompt

    def _rows(self, file: bytes) -> int:
        return int((self._reference.inputs("<image>", [file])["input_ids"] == self._mark).sum())

    def wrong(self, prompt: Sequence[int], output: Sequence[int], how: SamplingParams, index: int = 0) -> str:
        inputs = self._inputs.get(tuple(prompt))
        if inputs is None or not output:
            return super().wrong(prompt, output, how, index)
        rows = self._reference.logits(inputs, list(output))[:-1]
        for position, (row, token) in enumerate(zip(rows, output, strict=True)):
            if float(row.max() - row[token]) > GAP:
                return f"token {token} at position {position} of {len(output)} should be {int(row.argmax())}"
        return ""
