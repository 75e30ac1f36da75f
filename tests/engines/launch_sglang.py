"""Runs SGLang's server with one import of SGLang in place of three: scheduler and detokeniser are forked, on a CPU.

KV of a pair goes from memory to memory. Two things of SGLang 0.5.23 ask for CUDA there: its host memory is registered
with CUDA, and it tells NIXL that all KV is in a GPU's memory.
Run by the Python of vLLM's environment, with SGLang's own flags.
"""

import multiprocessing
import runpy
from types import SimpleNamespace
from typing import Any

import torch
from nixl._api import nixl_agent

set_start_method, begin_agent = multiprocessing.set_start_method, nixl_agent.__init__


def fork(method: str | None, *, force: bool = False) -> None:
    """Takes no other way; SGLang asks for new processes."""
    set_start_method("fork", force=True)


def begin_in_memory(agent: Any, *arguments: Any, **settings: Any) -> None:
    """As NIXL's own, for an engine without a GPU."""
    begin_agent(agent, *arguments, **settings)
    agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]


multiprocessing.set_start_method = fork  # type: ignore[assignment]
nixl_agent.__init__ = begin_in_memory
torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda address, size, flags: 0)
runpy.run_module("sglang.launch_server", run_name="__main__")
