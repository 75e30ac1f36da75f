"""A world that looks at each run: no step of it is longer than a promise that can be kept, and no preempted request
starves beside other tenants.
"""

from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.engine.decode.core.actions import Action, StartRun
from moonpool.engine.decode.core.events import Event
from moonpool.engine.decode.core.settings import DecodeSettings
from tests.unit.engine.decode.core.waits import WaitLimit
from tests.unit.engine.decode.core.world import World

STEEP = Speeds(
    prefill_per_token_s=1e-4, decode_base_s=2e-4, decode_per_sequence_s=5e-4, decode_per_context_token_s=2e-5
)
"""Context counts: 50 tokens take as long as two sequences."""


class PacedWorld(World):
    """Looks at each run when it is ordered, and at who waits.

    Attributes:
        waits: how long preempted requests wait.
    """

    def __init__(self, config: DecodeSettings) -> None:
        self.waits = WaitLimit()
        super().__init__(config)

    def post(self, event: Event) -> list[Action]:
        out = super().post(event)
        self.waits.look(self.core, len(self.ios))
        for action in out:
            if isinstance(action, StartRun):
                assert_paced(self, action)
        return out


def assert_paced(world: World, run: StartRun) -> None:
    """Each step is predicted to be within each promise of its members that a step over its own sequences would keep.

    Where somebody in the batch was promised nothing, it is within all.
    """
    speeds, tokens = world.core.tracker.speeds, {number: len(world.sequences[number].tokens) for number in run.batch}
    members: dict[int, list[int]] = {}
    for number in run.batch:
        members.setdefault(world.sequences[number].request, []).append(number)
    promises = {request: world.core.requests[request].tbt_slo_s for request in members}
    count, start = sum(chunk.count for chunk in run.chunks), max((chunk.start for chunk in run.chunks), default=0)

    def step_s(numbers: list[int], step: int) -> float:
        return decode_step_seconds(speeds, len(numbers), sum(tokens[number] + step for number in numbers))

    for step in range(run.steps):
        seconds = step_s(list(run.batch), step) + prefill_seconds(speeds, count, start)
        for request, promise in promises.items():
            kept = not promise or seconds <= promise
            alone_s = step_s(members[request], step)
            assert kept or (alone_s > promise and all(promises.values())), f"{seconds} s, {promise} s were promised"
