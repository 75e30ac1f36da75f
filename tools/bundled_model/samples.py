"""Continuations for the model card: prompts, decoding, and what came of them."""

from __future__ import annotations

import dataclasses

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from tools.bundled_model.chat import chat_header
from tools.bundled_model.config import BOS_ID, EOS_ID
from tools.bundled_model.network import Llama
from tools.bundled_model.tokenizer import encode_text

#: The beginnings of two documents, and one conversation.
PROMPTS = (
    '"""Utilities for reading and writing configuration files.',
    "class Queue:\n    def __init__(self, maxsize=0):",
    chat_header("Return the absolute path of a file."),
)
TEMPERATURE, TOP_P = 0.7, 0.9


@dataclasses.dataclass(frozen=True)
class Sample:
    """A continuation for the card."""

    prompt: str
    temperature: float
    text: str
    ended: bool


@torch.inference_mode()
def continue_text(model: Llama, ids: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Return up to ``count`` tokens after ``ids``, ending with ``</s>`` if the model ends; greedy at temperature 0."""
    ids = list(ids)
    produced: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(produced) < count and (not produced or produced[-1] != EOS_ID):
        logits = functional.linear(model(torch.tensor([ids]))[0, -1], model.embed_tokens.weight)
        if temperature > 0:
            ranked, order = (logits / temperature).softmax(-1).sort(descending=True)
            ranked[ranked.cumsum(0) - ranked > TOP_P] = 0.0
            token = int(order[torch.multinomial(ranked, 1, generator=generator)])
        else:
            token = int(logits.argmax())
        produced.append(token)
        ids.append(token)
    return produced


def make_samples(model: Llama, tokenizer: Tokenizer, count: int, seed: int) -> list[Sample]:
    """Return the continuations of the prompts by up to ``count`` tokens: each greedy, then each drawn."""
    samples = []
    for temperature in (0.0, TEMPERATURE):
        for prompt in PROMPTS:
            ids = [BOS_ID, *encode_text(tokenizer, prompt)]
            produced = continue_text(model, ids, count, temperature, seed)
            samples.append(Sample(prompt, temperature, tokenizer.decode(produced), produced[-1] == EOS_ID))
    return samples
