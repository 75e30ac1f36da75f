"""Fails after a figure."""

from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 60


def check(where: Where, figures: Figures) -> None:
    figures["found"] = 3
    expect(False, "the answer is 4")


if __name__ == "__main__":
    stage_main("fails", check)
