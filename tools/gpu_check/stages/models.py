"""Checkpoints of a 0.5B and an 8B shape with random weights are there for the stages that serve them."""

from tools.gpu_check.serving import EXACT, LARGE, SMALL, TINY, TINY_EXACT, TINY_LLAMA, checkpoint
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 150
BESIDE_NEXT = True
"""Drawing and writing needs no GPU."""


def check(where: Where, figures: Figures) -> None:
    """Create them; a stage creates what is not there."""
    for served in (TINY, TINY_EXACT, TINY_LLAMA) if where.tiny else (SMALL, EXACT, LARGE):
        checkpoint(where, served, figures)


if __name__ == "__main__":
    stage_main("models", check)
