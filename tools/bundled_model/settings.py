"""The flags of the command, and what they are without being given."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

DEFAULT_OUT = pathlib.Path(__file__).resolve().parents[2] / "moonpool" / "bundled" / "tiny"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One field per flag; ``--help`` says what each means."""

    out: pathlib.Path
    tokens: int
    minutes: float | None
    seed: int
    threads: int
    batch_tokens: int
    muon_lr: float
    adam_lr: float
    weight_decay: float
    test_share: float
    held_out_percent: float
    stride: int
    sample_tokens: int
    every_s: float
    copy_minutes: float
    note: str


def parse_settings(argv: Sequence[str] | None) -> Settings:
    """Read the command line; None means this process's own."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bundled_model", description="Train Moonpool's bundled model."
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=DEFAULT_OUT, help="the folder to write")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--tokens", type=int, default=7_500_000, help="tokens to train on (default %(default)s)")
    budget.add_argument("--minutes", type=float, help="instead: measure the speed, then train for about this long")
    add("--seed", type=int, default=20240607, help="seed of weights and order (default %(default)s)")
    add("--threads", type=int, default=2, help="processor threads (default %(default)s)")
    add("--batch-tokens", type=int, default=4096, help="tokens of a step, or one window where that is longer")
    add("--muon-lr", type=float, default=1e-2, help="peak rate of Muon (matrices)")
    add("--adam-lr", type=float, default=6e-3, help="peak rate of AdamW (embedding and norms)")
    add("--weight-decay", type=float, default=0.05, help="weight decay of the matrices")
    add("--test-share", type=float, default=0.35, help="part of the test suite in each epoch")
    add("--held-out-percent", type=float, default=5.0, help="part of the files that is held out")
    add("--stride", type=int, default=1024, help="tokens from one evaluation window to the next")
    add("--sample-tokens", type=int, default=160, help="length of the samples in the card")
    add("--every", dest="every_s", metavar="SECONDS", type=float, default=10.0, help="seconds between progress lines")
    add("--copy-minutes", type=float, default=10.0, help="minutes between copies of the folder")
    add("--note", default="", help="a remark for the model card, such as how busy the machine was")
    return Settings(**vars(parser.parse_args(argv)))
