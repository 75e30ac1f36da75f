"""What the services' cores are told of a simulated cluster."""

from moonpool.frozen import frozen
from services.decode.core.config import CoreConfig
from services.prefill.core.state import Settings
from simulator.cluster.config import ClusterConfig


@frozen
class Runs:
    """Decode steps that an engine takes by itself."""

    longest: int = 1 << 40
    """So many at once at most."""
    ahead: int = 0
    """For so many steps to come sequences get blocks, while enough are free; 0 = a run ends where one needs a block."""


LEAPS = Runs()
"""As many steps at once as there is nothing to decide."""


def core_settings(config: ClusterConfig, stages: int = 1) -> Settings:
    """What the core of a prefill instance is told. Each stage holds its own layers of all blocks."""
    return Settings(
        blocks=stages * config.blocks,
        block_tokens=config.block_tokens,
        layers=config.profile.layers,
        slice_bytes=config.block_bytes // config.profile.layers,
        step_tokens=max(config.step_tokens, config.block_tokens),
        stages=stages,
        max_queue=config.max_queue,
    )


def core_config(config: ClusterConfig, runs: Runs) -> CoreConfig:
    """What the core of a decode instance is told."""
    memory = config.memory
    return CoreConfig(
        num_blocks=config.blocks,
        block_tokens=config.block_tokens,
        block_bytes=config.block_bytes,
        max_batch=config.max_batch,
        lease_s=memory.lease_s,
        speeds=config.profile.speeds,
        preemption=memory.preemption,
        watermark_blocks=int(memory.watermark * config.blocks),
        step_tokens=memory.step_tokens,
        swap_blocks=memory.swap_bytes // config.block_bytes,
        assumed_answer_tokens=memory.assumed_answer_tokens,
        run_steps=runs.longest,
        ahead_steps=runs.ahead,
    )
