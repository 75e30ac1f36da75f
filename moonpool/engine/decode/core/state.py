"""State that the decode scheduler's parts share."""

from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.engine.decode.core.actions import Action
from moonpool.engine.decode.core.block_budget import BlockBudget
from moonpool.engine.decode.core.in_flight import IoInFlight
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.scheduler.block_table import PinnedIo
from moonpool.engine.scheduler.block_writes import BlockWrites


class DecodeState:
    """One instance's settings, blocks and speeds, and the event being handled.

    Attributes:
        settings: the instance's.
        blocks: the pool's block manager.
        budget: available, promised and expected blocks.
        tracker: the engine's measured speeds; predicts times.
        ios: I/O in flight, with the blocks that each pins.
        writes: blocks being written to kvstores.
        now: time of the event being handled, seconds.
        out: actions of the event being handled.
    """

    def __init__(self, settings: DecodeSettings) -> None:
        self.settings = settings
        self.blocks = BlockManager(settings.num_blocks, settings.window_blocks, settings.window_slots)
        self.budget = BlockBudget(self.blocks, settings.watermark_blocks)
        self.tracker = SpeedTracker(settings.speeds)
        self.ios: PinnedIo[IoInFlight] = PinnedIo(self.blocks)
        self.writes = BlockWrites(self.blocks)
        self.now = 0.0
        self.out: list[Action] = []

    def act(self, action: Action) -> None:
        """Add an action."""
        self.out.append(action)
