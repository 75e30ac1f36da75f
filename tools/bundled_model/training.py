"""The training loop: the stages of window lengths, the token budget, progress lines and early copies.

Does not know how a step computes (``step``) nor what a copy is made of (the caller saves).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tools.bundled_model.config import PAD_ID
from tools.bundled_model.corpus import Corpus
from tools.bundled_model.network import Llama
from tools.bundled_model.settings import Settings
from tools.bundled_model.step import Stepper, learning_rate


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of training: its share of the tokens and the length of its windows."""

    share: float
    length: int


STAGES = (Stage(0.80, 1024), Stage(0.10, 2048), Stage(0.10, 8192))


@dataclasses.dataclass
class Outcome:
    """What became of training; the times are minutes of the clock and of all its processor threads together."""

    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    cpu_minutes: float = 0.0
    final_loss: float = float("nan")


def stage_at(progress: float) -> int:
    """Return the index of the stage in ``STAGES`` at ``progress`` (0 to 1)."""
    ends = [sum(stage.share for stage in STAGES[: i + 1]) for i in range(len(STAGES))]
    return next(i for i, end in enumerate(ends) if progress < end or i == len(ends) - 1)


class Feed:
    """The batches of a run: each stage draws rows of its own length, in an order of its own seed."""

    def __init__(self, corpus: Corpus, batch_tokens: int, seed: int) -> None:
        """Draw from ``corpus``; a batch has ``batch_tokens`` tokens, or one row where that is longer."""
        self._corpus = corpus
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._stage = -1
        self._rows: Iterator[Tensor] = iter(())

    def batch(self, progress: float) -> Tensor:
        """Return the next batch at ``progress``, ``[rows, length + 1]``."""
        index = stage_at(progress)
        length = STAGES[index].length
        if index != self._stage:
            self._stage = index
            self._rows = self._corpus.rows(length, self._seed + index)
            print(f"stage {index + 1}: windows of {length} tokens", flush=True)
        return torch.stack([next(self._rows) for _ in range(max(1, self._batch_tokens // length))])


def train(model: Llama, corpus: Corpus, settings: Settings, tokens: int, save: Callable[[], None]) -> Outcome:
    """Train ``model`` on ``tokens`` tokens, with a progress line now and then; ``save`` is called for early copies."""
    stepper = Stepper(model, settings.muon_lr, settings.adam_lr, settings.weight_decay)
    feed = Feed(corpus, settings.batch_tokens, settings.seed)
    done = Outcome()
    began, cpu_began = time.monotonic(), time.process_time()
    last_line = last_copy = began
    copies = 0
    while done.tokens < tokens:
        progress = done.tokens / tokens
        factor = learning_rate(progress)
        batch = feed.batch(progress)
        loss = stepper.step(batch, factor)
        done.tokens += batch[:, 1:].numel()
        done.steps += 1
        done.final_loss = loss if math.isnan(done.final_loss) else 0.97 * done.final_loss + 0.03 * loss
        now = time.monotonic()
        if now - last_line >= settings.every_s or done.tokens >= tokens:
            last_line = now
            print(progress_line(done, tokens, factor, now - began), flush=True)
        # The first copy comes early: an interrupted run then leaves at least that.
        if now - last_copy >= 60 * settings.copy_minutes * (0.2 if copies == 0 else 1.0):
            last_copy, copies = now, copies + 1
            save()
    done.minutes = (time.monotonic() - began) / 60
    done.cpu_minutes = (time.process_time() - cpu_began) / 60
    return done


def progress_line(done: Outcome, tokens: int, factor: float, spent_s: float) -> str:
    """Say how far training is: ``done`` of ``tokens`` tokens, at ``factor`` of the rates, after ``spent_s`` seconds."""
    left_minutes = spent_s / done.tokens * (tokens - done.tokens) / 60
    return (
        f"step {done.steps:5d}  tokens {done.tokens / 1e6:6.2f}M/{tokens / 1e6:.2f}M  loss {done.final_loss:.4f}"
        f"  lr {factor:.3f}  {done.tokens / spent_s:7.0f} tok/s  {spent_s / 60:5.1f} min, {left_minutes:5.1f} left"
    )


def measure_speed(model: Llama, batch_tokens: int) -> float:
    """Return the tokens per second of a few throw-away steps at 1k windows."""
    ids = torch.randint(PAD_ID + 1, model.shape.vocab_size, (batch_tokens // 1024, 1025))
    began = time.monotonic()
    for step in range(5):
        if step == 1:  # the first one warms up
            began = time.monotonic()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.cat(list(model.losses(ids[:, :-1], ids[:, 1:]))).mean().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return 4 * ids.shape[0] * 1024 / (time.monotonic() - began)
