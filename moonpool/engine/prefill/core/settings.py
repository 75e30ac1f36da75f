"""Settings of the prefill scheduler."""

from dataclasses import dataclass

from moonpool.base.kv.layout import STATES_IN_WORK
from moonpool.base.scheduling.steps import max_steps_in_flight
from moonpool.base.settings import setting
from moonpool.engine.scheduler.settings import PoolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings(PoolSettings):
    """One prefill instance's settings.

    Attributes:
        layers: the model's layers; a block is sent and loaded layer by layer.
        max_num_batched_tokens: most tokens in a step; at least one block.
        stages: of the pipeline that computes the steps.
        max_started: most requests with blocks.
        windowed_layers: layers that need the slices of a sequence's last blocks only.
    """

    layers: int
    max_num_batched_tokens: int
    stages: int = 1
    max_started: int = 64
    max_queue: int = setting(1024, "requests waiting or running at most; more are refused", ge=1)
    verdict_timeout_s: float = setting(30.0, "seconds a decode instance has to confirm a transfer", gt=0)
    windowed_layers: frozenset[int] = frozenset()

    @property
    def max_steps(self) -> int:
        """Most steps in flight."""
        return max_steps_in_flight(self.stages)

    @property
    def slice_bytes(self) -> int:
        """Bytes for one layer in one block, on average, rounded up."""
        return -(-self.block_bytes // self.layers)

    def held_window_blocks(self, tokens: int) -> int:
        """Return window blocks that a prompt with `tokens` tokens holds between two steps."""
        return min(self.blocks_for(tokens), self.window_blocks + 1) if self.window_blocks else 0

    @property
    def window_blocks_in_work(self) -> int:
        """Window blocks that steps in flight need besides those held between steps."""
        if not self.window_blocks:
            return 0
        per_step = STATES_IN_WORK if self.states_alone else self.blocks_for(self.max_num_batched_tokens) + 1
        return self.max_steps * per_step
