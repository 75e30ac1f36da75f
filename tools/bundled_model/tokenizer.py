"""The tokenizer: how it is trained, and how texts and conversations become token ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.bundled_model.chat import Turn, chat_header
from tools.bundled_model.config import BOS, BOS_ID, EOS, EOS_ID, PAD, PAD_ID


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train the byte-level BPE tokenizer; every byte is in its alphabet, so any text can be encoded.

    Raises:
        RuntimeError: the special tokens did not get the ids that ``config`` states.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    if [tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)] != [BOS_ID, EOS_ID, PAD_ID]:
        raise RuntimeError("the special tokens did not get the ids 0, 1, 2")
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Return the bytes of text that each token id stands for; special tokens stand for none."""
    sizes = [0] * tokenizer.get_vocab_size()
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = len(token) if index > PAD_ID else 0  # one character of the byte-level alphabet is one byte
    return sizes


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode ``text`` without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a whole text: ``<s>`` before it and ``</s>`` after it."""
    return [BOS_ID, *encode_text(tokenizer, text), EOS_ID]


def encode_conversation(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[int]:
    """Encode a conversation: one ``<s>`` at the start and an ``</s>`` after each reply."""
    ids = [BOS_ID]
    for number, (question, reply) in enumerate(turns):
        ids += encode_text(tokenizer, ("\n" if number else "") + chat_header(question) + reply)
        ids.append(EOS_ID)
    return ids
