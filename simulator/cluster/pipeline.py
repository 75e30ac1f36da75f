"""The engine of a simulated prefill instance: computes steps layer by layer, in the stages of a pipeline.

A step's layers take equal shares of its time, and come first among what happens at one time. Each stage has consecutive
layers and computes one step at a time; so as many steps are under way as there are stages. Steps end in their order,
also those that are given up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.sched.stages import stage_ranges
from simulator.cluster.company import Company
from simulator.kernel.clock import PS, World


@dataclass(slots=True, eq=False)
class Step:
    """A step that is being computed. Times are picoseconds."""

    io: int
    duration: int
    gate: int
    """Layers up to this one may be computed."""
    done: int = 0
    """Layers that are computed."""
    late: int = 0
    """So much longer it has taken in company."""
    computing: bool = False
    aborted: bool = False


class Pipeline:
    """Steps under way, until the instance is lost.

    Args:
        layers: of the KV.
        stages: that these are divided among.
        layer_done: told of a step's io and a layer that is computed.
        over: told of a step's io, whether it was given up, and the seconds that its computing took in all stages.
        company: of the machine's engines.
    """

    def __init__(
        self,
        world: World,
        layers: int,
        stages: int,
        layer_done: Callable[[int, int], None],
        over: Callable[[int, bool, float], None],
        company: Company,
    ) -> None:
        self._world, self._layers = world, layers
        self._ends = [end for begin, end in stage_ranges(layers, stages) for _ in range(begin, end)]  # by layer
        self._layer_done, self._over = layer_done, over
        self._steps: list[Step] = []
        self._member = company.joins(lambda: None)  # its pace is looked at with each layer

    def begin(self, io: int, duration: int, *, gated: bool) -> None:
        """The next step; the gates of a gated one are opened afterwards."""
        self._member.computes(True)
        self._steps.append(Step(io, duration, -1 if gated else self._layers))
        self._go_on()

    def open_gate(self, io: int, layer: int) -> None:
        """A step may compute all layers up to this one; steps that are over are fine."""
        for step in self._steps:
            if step.io == io:
                step.gate = max(step.gate, layer)
                self._go_on()
                return

    def abort(self, io: int) -> None:
        """Gives a step up before its next layer; steps that are over are fine."""
        for step in self._steps:
            if step.io == io:
                step.aborted = True
                self._go_on()
                return

    def close(self) -> None:
        """The instance is lost."""
        self._steps.clear()
        self._member.computes(False)

    def _go_on(self) -> None:
        while self._steps and not (step := self._steps[0]).computing and (step.aborted or step.done == self._layers):
            del self._steps[0]
            self._over(step.io, step.done < self._layers, (step.duration + step.late) / PS)
        left = self._layers  # layers that all steps ahead have left behind
        for step in self._steps:
            if self._may_compute(step, left):
                self._compute(step)
            left = min(left, step.done if step.computing or not step.aborted else self._layers)
        if not self._steps:
            self._member.computes(False)

    def _may_compute(self, step: Step, left: int) -> bool:
        if step.computing or step.aborted or step.done > step.gate or step.done == self._layers:
            return False
        return left >= self._ends[step.done]

    def _compute(self, step: Step) -> None:
        step.computing = True
        alone = step.duration * (step.done + 1) // self._layers - step.duration * step.done // self._layers
        pace = self._member.pace
        took = alone if pace == 1.0 else round(pace * alone)
        step.late += took - alone
        self._world.at(self._world.now + took, self._computed, step, first=True)

    def _computed(self, step: Step) -> None:
        if step not in self._steps:
            return
        step.computing = False
        if not step.aborted:
            step.done += 1
            self._layer_done(step.io, step.done - 1)
        self._go_on()
