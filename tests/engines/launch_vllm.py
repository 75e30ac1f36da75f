"""Runs vLLM's API server with one import of vLLM in place of three: engine core and worker are forked, on a CPU.

Processes that wait for each other sleep in between; vLLM's own spin, which takes a machine with few cores from tests.
Run by the Python of vLLM's environment, with vLLM's own flags.
"""

import runpy
import time
from types import SimpleNamespace
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.entrypoints.openai import api_server  # noqa: F401  # before the fork
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import core

WAIT_S = 0.0005
EMPTY_STEP_S = 0.01
"""Between steps without tokens, which an engine makes while KV comes or goes; vLLM makes a thousand a second."""
check_and_update_config = CpuPlatform.check_and_update_config.__func__


def fork_workers(cls: type, config: Any) -> None:
    """As vLLM's own, which asks for new processes at its end."""
    import os

    check_and_update_config(cls, config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = classmethod(fork_workers)
shm_broadcast.sched_yield = lambda: time.sleep(WAIT_S)
core.time = SimpleNamespace(**{**vars(time), "sleep": lambda _: time.sleep(EMPTY_STEP_S)})
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
