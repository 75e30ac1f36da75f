"""The command: calls the steps of a run in their order and says what each gave."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from tools.bundled_model.card import UNFINISHED, UNMEASURED, Run, make_card
from tools.bundled_model.config import Shape
from tools.bundled_model.corpus import Corpus
from tools.bundled_model.evaluation import Evaluation, evaluate
from tools.bundled_model.folder import Folder
from tools.bundled_model.network import Llama
from tools.bundled_model.samples import Sample, make_samples
from tools.bundled_model.settings import Settings, parse_settings
from tools.bundled_model.text import Split, collect_documents, split_documents
from tools.bundled_model.tokenizer import train_tokenizer
from tools.bundled_model.training import measure_speed, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps."""
    settings = parse_settings(argv)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    _say(f"seed {settings.seed}, {settings.threads} threads, torch {torch.__version__}")
    shape = Shape()
    split = _collect(settings)
    tokenizer, corpus, epoch_tokens = _tokenize(settings, split, shape)

    model = Llama(shape)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = settings.tokens
    if settings.minutes is not None:
        tokens = int(measure_speed(model, settings.batch_tokens) * 0.9 * 60 * settings.minutes)
    _say(f"model: {parameters:,} parameters; {tokens:,} tokens")
    folder = Folder(settings.out, shape, tokenizer)
    outcome = train(model, corpus, settings, tokens, save=lambda: folder.write(model, UNFINISHED))

    folder.write(model, UNMEASURED)
    saved = folder.load()
    evaluation, samples = _assess(settings, saved, split, tokenizer)
    size = folder.weights.stat().st_size
    run = Run(settings, shape, split, epoch_tokens, outcome, evaluation, samples, parameters, size)
    folder.write(saved, make_card(run))
    _say(f"wrote {settings.out.name}: {size:,} bytes of weights, {outcome.minutes:.1f} minutes of training")
    return 0


def _collect(settings: Settings) -> Split:
    """Find the texts and part them."""
    split = split_documents(collect_documents(), settings.held_out_percent)
    _say(
        f"text: {len(split.training)} files, {split.training_bytes / 1e6:.2f} MB; held out: {len(split.held_out)}, "
        f"{split.held_out_bytes / 1e6:.2f} MB"
    )
    return split


def _tokenize(settings: Settings, split: Split, shape: Shape) -> tuple[Tokenizer, Corpus, int]:
    """Train the tokenizer and encode the training texts; also return the tokens of an epoch."""
    began = time.monotonic()
    rng = random.Random(settings.seed)
    texts = [d.text for d in split.training if not d.is_test or rng.random() < settings.test_share]
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    corpus = Corpus(split.training, tokenizer, settings.test_share)
    epoch_tokens = len(corpus.epoch(random.Random(settings.seed)))
    _say(
        f"tokenizer: {tokenizer.get_vocab_size()} entries, {time.monotonic() - began:.0f} s; library "
        f"{sum(map(len, corpus.library)) / 1e6:.2f}M tokens, conversations {len(corpus.chats)} with "
        f"{sum(map(len, corpus.chats)) / 1e6:.2f}M, tests {sum(map(len, corpus.tests)) / 1e6:.2f}M, "
        f"epoch {epoch_tokens / 1e6:.2f}M"
    )
    return tokenizer, corpus, epoch_tokens


def _assess(settings: Settings, saved: Llama, split: Split, tokenizer: Tokenizer) -> tuple[Evaluation, list[Sample]]:
    """Measure the saved model and let it write."""
    result = evaluate(saved, split.held_out, tokenizer, settings.stride)
    _say(
        f"held-out bits per byte: {result.first:.4f} at 0-1k, {result.last:.4f} at 7-8k over {result.windows} windows "
        f"of {result.files} files; same text {result.same_text_first:.4f}, {result.same_text_last:.4f}; "
        f"all files {result.whole:.4f}\nby 1k block: {' '.join(f'{x:.4f}' for x in result.by_block)}"
    )
    samples = make_samples(saved, tokenizer, settings.sample_tokens, settings.seed)
    for sample in samples:
        _say(f"--- prompt (temperature {sample.temperature:g})\n{sample.prompt}\n--- continuation\n{sample.text}")
    return result, samples


def _say(line: str) -> None:
    """Print at once: the output is often a file that somebody follows."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
