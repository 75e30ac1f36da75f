"""Driver and package versions, and an import of each module that serving and the check need."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess

from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 120
NEEDED = (
    *("torch", "numpy", "grpc", "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "google.protobuf"),
    *("blake3", "cryptography", "gguf", "httptools", "jinja2", "llguidance", "lmdb", "pydantic", "pydantic_settings"),
    *("safetensors", "starlette", "structlog", "tokenizers", "uvicorn", "xxhash", "yaml"),
    *("pytest", "pytest_asyncio", "pytest_timeout", "xdist"),
)
ON_A_GPU = ("triton",)
OPTIONAL = ("flashinfer", "transformers", "uvloop")
"""Packages that are measured or compared if they import."""
TOLD = ("torch", "triton", "numpy", "transformers", "grpcio", "pytest", "flashinfer-python")


def check(where: Where, figures: Figures) -> None:
    """Tell versions; fail on every missing import, all named."""
    figures["python"] = platform.python_version()
    figures["cores"] = len(os.sched_getaffinity(0))
    figures["host memory, GiB"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    figures["g++"] = _first_line(["g++", "--version"])
    for package in TOLD:
        figures[package] = _version(package)
    figures["driver"] = _first_line(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    )
    missing = [module for module in (*NEEDED, *(ON_A_GPU if where.on_gpu else ())) if not _imports(module)]
    absent = [module for module in OPTIONAL if not _imports(module)]
    figures["optional and absent"] = ", ".join(absent) or "none"
    expect(not missing, f"missing imports: {', '.join(missing)}")
    if where.on_gpu:
        import torch

        expect(torch.cuda.is_available(), "torch finds no GPU")
        figures["GPU"] = torch.cuda.get_device_name()
        figures["CUDA of torch"] = str(torch.version.cuda)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _first_line(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return "absent"
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout or done.stderr).partition("\n")[0]


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"import {module}: {type(error).__name__}: {error}")
        return False
    return True


if __name__ == "__main__":
    stage_main("versions", check)
