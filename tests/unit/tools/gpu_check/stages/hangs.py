"""Never ends by itself, and neither does its process."""

import signal
import subprocess
import sys

from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 3


def check(where: Where, figures: Figures) -> None:
    figures["before"] = 1
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.DEVNULL)
    (where.out / "child").write_text(str(child.pid))
    signal.pause()


if __name__ == "__main__":
    stage_main("hangs", check)
