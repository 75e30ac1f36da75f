"""The stack of a storm, and the judge that knows the right answers of its engine."""

from pathlib import Path

from moonpool.base.checkpoint import load_config
from moonpool.cli.stack import StackPlan
from tests.faults.judges import EmulatedJudge, ReferenceJudge
from tests.faults.storm import Judge
from tests.integration.reference import Reference

BLOCK = 16


def judge_of(model: Path, engine: str) -> Judge:
    """The judge of an engine's answers."""
    if engine == "real":
        return ReferenceJudge(Reference(model))
    config = load_config(model)
    return EmulatedJudge(config.vocab_size, config.eos_token_ids)


def base_plan(
    model: Path,
    folder: Path,
    engine: str,
    *,
    blocks: int = 256,
    device: str = "cpu",
    ranks: int = 1,
    both: bool = False,
) -> StackPlan:
    """Two instances of each kind of engine; pools and tiers are small, so that requests wait and blocks are evicted.

    Args:
        model, folder: the checkpoint, and where the services' data lie.
        engine, device: of prefill and decode.
        blocks: of each engine's pool.
        ranks: processes of each stage.
        both: decode instances compute prompts, and there is no prefill instance.
    """
    pool = ["--set", f"blocks={blocks}", "--device", device]
    if ranks > 1:
        pool += ["--set", f"tensor_parallel_size={ranks}"]
    decode = [*pool, "--set", "computes_prompts=true"] if both else pool
    return StackPlan(
        model=str(model),
        data_dir=folder,
        dtype="float32" if engine == "real" else "auto",
        prefill=0 if both else 2,
        decode=2,
        engine=engine,
        time_scale=0.0 if engine == "real" else 4.0,
        threads=1,
        block_size=BLOCK,
        dram_bytes=2 << 20,
        ssd_bytes=64 << 20,
        extra={"prefill": ["--max-num-batched-tokens", "64", *pool], "decode": decode},
    )
