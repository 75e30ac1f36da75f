"""Instances that do not fit the cluster's model."""

from pathlib import Path

import pytest

from moonpool.base.rpc.process import EXIT_MISMATCH
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import BLOCK
from tests.integration.hostile.raw import Stack
from tests.integration.test_bad_start import start


@pytest.mark.parametrize(
    ("seed", "flags", "field"),
    [
        (1, (), "model.namespace: "),
        pytest.param(0, ("--kv-cache-dtype", "int8"), "model.layout.dtype: ", marks=pytest.mark.slow),
    ],
)
def test_an_instance_of_another_namespace(
    stack: Stack, checkpoint: Path, tmp_path: Path, seed: int, flags: tuple[str, ...], field: str
) -> None:
    """Other weights under the same name, or KV of another type: the instance ends and says what differs."""
    model = checkpoint
    if seed:
        create("tiny-llama", model := tmp_path / checkpoint.name, seed=seed, dtype="float32")
    where = ("--conductor", stack.address("conductor"), "--model", str(model), "--block-size", str(BLOCK))
    code, said = start(
        "moonpool.engine.decode", *where, "--threads", "1", "--kv-cache-memory-bytes", str(4 << 20), *flags
    )
    assert code == EXIT_MISMATCH, said
    assert said.strip().splitlines()[-1].startswith(f"decode: {field}"), said
