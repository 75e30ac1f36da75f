"""Instances that do not fit the cluster's model."""

from pathlib import Path

from moonpool.model.create import create
from moonpool.rpc.process import EXIT_MISMATCH
from tests.integration.conftest import BLOCK
from tests.integration.hostile.raw import Stack
from tests.integration.test_bad_start import start


def test_an_instance_of_another_namespace(stack: Stack, checkpoint: Path, tmp_path: Path) -> None:
    """Other weights under the same name, and KV of another type: the instance ends and says what differs."""
    other = tmp_path / checkpoint.name
    create("tiny-llama", other, seed=1, dtype="float32")
    conductor = ("--conductor", stack.address("conductor"), "--threads", "1", "--kv-bytes", str(4 << 20))
    for flags, field in (
        (("--model", str(other), "--block-tokens", str(BLOCK)), "model.namespace: "),
        (("--model", str(checkpoint), "--block-tokens", str(BLOCK), "--kv-dtype", "int8"), "model.layout.dtype: "),
    ):
        code, said = start("services.decode", *conductor, *flags)
        assert code == EXIT_MISMATCH, said
        assert said.strip().splitlines()[-1].startswith(f"decode: {field}"), said
