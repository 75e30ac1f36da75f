"""A step under way and, where it begins a run, what its further steps have in common with it.

Packed sequences and rows of the sampler are made once and changed in place from step to step: a run's membership does
not change, so a decode step has next to nothing to do in Python.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moonpool.engine.captures import GraphShape
from moonpool.engine.choosing import Choosing, Found
from moonpool.engine.devices.lanes import Mark
from moonpool.engine.masks import Making
from moonpool.engine.messages import StepDone
from moonpool.model.batch import PackedBatch
from moonpool.model.native_run import NativeRun
from moonpool.sched.steps import TELL_S, TOLD_TOGETHER, Step


@dataclass(slots=True)
class Run:
    """The tensors belong to the computing lane while a step is under way."""

    step: Step
    """As it was ordered: the run's first."""
    packed: PackedBatch
    """On the host."""
    masks: Making | None
    """Of the step under way, where some are wanted."""
    tails: list[int] | None
    """Of each sequence, its last rows whose hidden states after the last layer are wanted; None = all rows."""
    layer: int
    """That it has come to."""
    left: int
    """Steps after this one, at most."""
    batch: PackedBatch = field(init=False)
    """`packed` where it is computed; on the host where a graph computes it."""
    shape: GraphShape | None = None
    """Of the graph that all layers of the step are."""
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, hidden]; before the embedding nothing
    choosing: Choosing | None = None
    """Made with the first choice."""
    native: NativeRun | None = None
    """Its steps from now on, where native calls take them."""
    found: Found = field(default_factory=Found)
    followed: Mark | None = None
    """Where all is told that follows from its layers, if another thread does that."""
    _untold: list[StepDone] = field(default_factory=list)
    ends: frozenset[int] = field(init=False)
    """Tokens that it may be over with."""

    def __post_init__(self) -> None:
        self.batch = self.packed
        self.ends = frozenset().union(*(sequence.end_token_ids for sequence in self.step.sequences))

    def following(self) -> list[int] | None:
        """What each sequence goes on with; None when the run is over with this step."""
        if not self.left or self.choosing is None:
            return None
        tokens = [token for token in self.found.sampled if token is not None]
        if len(tokens) < len(self.found.sampled):
            return None
        if not self.ends.isdisjoint(tokens):
            pairs = zip(self.step.sequences, tokens, strict=True)
            return None if any(token in sequence.end_token_ids for sequence, token in pairs) else tokens
        return tokens

    def go_on(self, tokens: list[int], layer: int) -> None:
        """Makes it the run's next step, which begins at `layer` and goes on with these tokens; `masks` are set."""
        assert self.choosing is not None
        if self.native is None or not self.native.alone:
            self.choosing.go_on(tokens)
        if self.native is None:
            self.packed = self.batch = self.packed.after(tokens)
        self.tails, self.layer, self.left = None, layer, self.left - 1

    def together(self, now_ns: int) -> tuple[int, int]:
        """How many steps may be taken before the next one is told, and when one is told at the latest."""
        first_ns = self._untold[0].end_ns if self._untold else now_ns
        alone = self.step.patient and self.masks is None  # masks are made between two steps
        most = TOLD_TOGETHER - len(self._untold) if alone else 1
        return min(most, self.left + 1), first_ns + round(TELL_S * 1e9)

    def told(self, done: StepDone) -> StepDone | None:
        """What is told when a step is over; None where it waits for further ones of the run."""
        if self.step.patient and not done.over and len(self._untold) + 1 < TOLD_TOGETHER:
            first = self._untold[0] if self._untold else done
            if done.end_ns - first.end_ns < TELL_S * 1e9:
                self._untold.append(done)
                return None
        earlier, self._untold = tuple(self._untold), []
        return replace(done, earlier=earlier) if earlier else done
