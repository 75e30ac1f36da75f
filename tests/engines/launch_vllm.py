"""Runs vLLM's API server with one import of vLLM in place of three: engine core and worker are forked, on a CPU.

Run by the Python of vLLM's environment, with vLLM's own flags.
"""

import runpy
from typing import Any

from vllm.entrypoints.openai import api_server  # noqa: F401  # before the fork
from vllm.platforms.cpu import CpuPlatform

check_and_update_config = CpuPlatform.check_and_update_config.__func__


def fork_workers(cls: type, config: Any) -> None:
    """As vLLM's own, which asks for new processes at its end."""
    import os

    check_and_update_config(cls, config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = classmethod(fork_workers)
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
