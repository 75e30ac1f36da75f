"""Raises an error that is not the check's."""

from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 60


def check(where: Where, figures: Figures) -> None:
    raise KeyError("missing")


if __name__ == "__main__":
    stage_main("raises", check)
