"""The native kernels with the matrix unit's tiles as a plain model: what is built on tiles runs on every machine."""

import platform
from pathlib import Path

import pytest

from moonpool.base.native import build
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.native.library import Library

COMPILER = Path(__file__).with_name("tile_model_compiler")


@pytest.fixture
def tile_model(monkeypatch: pytest.MonkeyPatch) -> Library:
    """All kernels of this test run over the model, among this machine's other instructions but AMX and AVX-512."""
    if "avx2" not in build.processor_flags():
        pytest.skip(f"the model stands among AVX2's instructions, which this {platform.machine()} lacks")
    monkeypatch.setenv("CXX", str(COMPILER))
    monkeypatch.delenv("MOONPOOL_KERNELS_PREBUILT", raising=False)
    built = Library(build.build("avx2"))
    monkeypatch.setattr(library, "loader", library.Loader(lambda: built.path))
    return built
