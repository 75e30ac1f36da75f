"""Never ends, beside the next stage, which hears its end from a pipe."""

import contextlib
import os
import signal

from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 8
BESIDE_NEXT = True


def check(where: Where, figures: Figures) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(where.out / "pipe")
    with (where.out / "pipe").open("w"):
        signal.pause()


if __name__ == "__main__":
    stage_main("hangs_beside", check)
