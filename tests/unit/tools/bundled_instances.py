"""Small things that the tests of the bundled model's trainer share."""

import torch
from tokenizers import Tokenizer

from tools.bundled_model.config import Shape
from tools.bundled_model.network import Llama
from tools.bundled_model.tokenizer import train_tokenizer

SOURCE = '''def area(width, height):
    """Return the area of a rectangle."""
    checked = check(width, height)
    return checked.width * checked.height
'''
SMALL = Shape(
    vocab_size=300,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
)


def small_tokenizer() -> Tokenizer:
    return train_tokenizer([SOURCE * 3], SMALL.vocab_size)


def small_model(seed: int = 3) -> Llama:
    torch.manual_seed(seed)
    return Llama(SMALL)
