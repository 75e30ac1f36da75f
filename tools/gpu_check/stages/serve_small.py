"""A 0.5B shape is served: TTFT cold and 90 % cached, TPOT by batch, and gaps as a long prompt joins."""

from tools.gpu_check.client_speeds import SIZES, TINY_SIZES, serve
from tools.gpu_check.serving import SMALL, TINY
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 120


def check(where: Where, figures: Figures) -> None:
    """Serve and measure."""
    if where.tiny:
        serve(where, TINY, TINY_SIZES, figures)
    else:
        serve(where, SMALL, SIZES, figures)


if __name__ == "__main__":
    stage_main("serve_small", check)
