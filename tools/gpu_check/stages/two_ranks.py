"""Prefill and decode with two ranks each give the tokens of one: over NCCL, in graphs, or with both on one GPU."""

import time

from moonpool.base.checkpoint import load_config
from tools.gpu_check.serving import ENDING_S, EXACT, TINY_EXACT, CheckedStack, Prompts, checkpoint, plan_of
from tools.gpu_check.stages.two_stages import asked, compare, restart
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 240
BESIDE_NEXT = True
"""What is right must be right also while other processes use the GPU."""


def check(where: Where, figures: Figures) -> None:
    """Ask the same with one rank and with two."""
    end = time.monotonic() + where.limit_s - ENDING_S
    served = TINY_EXACT if where.tiny else EXACT
    model = checkpoint(where, served, figures)
    lengths = (40, 300) if where.tiny else (100, 700, 2048, 2048)
    prompts = list(map(Prompts(load_config(model).vocab_size), lengths))
    devices = _devices(where)
    figures["devices"] = devices
    with CheckedStack(plan_of(where, served, model, "two-ranks", {}), end - time.monotonic()) as stack:
        in_one = asked(stack, prompts, "one rank", end, figures)
        began = time.monotonic()
        for service in ("prefill-0", "decode-0"):
            restart(stack, service, ["--set", "tensor_parallel_size=2", "--device", devices], end)
        figures["starts of two ranks, s"] = round(time.monotonic() - began, 1)
        in_two = asked(stack, prompts, "two ranks", end, figures)
    stack.expect_ended_in_order()
    compare(prompts, in_one, in_two, figures)


def _devices(where: Where) -> str:
    """Return two GPUs, or a single one twice: then sums go through the host, and nothing is captured."""
    if not where.on_gpu:
        return f"{where.device}:1,{where.device}:2"
    import torch

    return "cuda:0,cuda:1" if torch.cuda.device_count() > 1 else "cuda:0,cuda:0"


if __name__ == "__main__":
    stage_main("two_ranks", check)
