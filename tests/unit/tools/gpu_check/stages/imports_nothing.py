"""Needs a package that is not there."""

import no_such_package  # type: ignore[import-not-found]  # noqa: F401

from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 60


def check(where: Where, figures: Figures) -> None:
    raise AssertionError("never called")


if __name__ == "__main__":
    stage_main("imports_nothing", check)
