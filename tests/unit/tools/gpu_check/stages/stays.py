"""Does not end when it is asked to."""

import signal

from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 1


def check(where: Where, figures: Figures) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


if __name__ == "__main__":
    stage_main("stays", check)
