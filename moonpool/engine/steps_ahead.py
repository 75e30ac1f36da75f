"""A run's steps on a device, given before the tokens of the step before are read."""

from collections import deque
from functools import partial

import numpy as np
from torch import Tensor

from moonpool.engine.cuda_graphs import DecodeGraphs, GraphShape
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.platforms.base import DeviceEvent, DeviceStream
from moonpool.engine.sampling.captured import PlainRows
from moonpool.engine.sampling.sampler import NOT_FINITE, NOTHING_LEFT
from moonpool.engine.step_sampler import StepOutput


class StepsAhead:
    """A run's steps that the device has been given and the host has not read: two at most.

    Args:
        graphs: compute them.
        stream: the compute stream.
        shape: the graph's, for all steps of the run.
        batch: the next step's, on the host; does not change before that step is read.
        rows: how tokens are chosen.
        later: steps of the run before the next.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        stream: DeviceStream,
        shape: GraphShape,
        batch: PackedBatch,
        rows: PlainRows,
        later: int,
    ) -> None:
        self._stream, self._rows, self._later = stream, rows, later
        self._compute = partial(graphs.go_on, shape, batch.num_tokens, rows.choice)
        self._found = [graphs.host_memory(batch.num_tokens) for _ in range(2)]
        self._given: deque[tuple[DeviceEvent, Tensor]] = deque()
        stream.run(partial(graphs.begin_run, shape, batch, rows))

    @property
    def last(self) -> DeviceEvent | None:
        """The event behind the last step that was given and is not read; None: all are read."""
        return self._given[-1][0] if self._given else None

    def give(self) -> None:
        """Give the device the next step."""
        numbers = None if self._rows.choice == "greedy" else self._rows.numbers(self._later)
        found = self._found[self._later % 2]
        self._stream.run(partial(self._compute, numbers, found))
        self._given.append((self._stream.record(), found))
        self._later += 1

    def read(self) -> tuple[StepOutput, DeviceEvent]:
        """Wait for the oldest step that was given; return its tokens, and the event behind it."""
        event, found = self._given.popleft()
        event.wait()
        tokens, bits = found.numpy()
        output, highest = StepOutput(tokens.tolist()), bits.view(np.float32)
        for row in np.flatnonzero(~np.isfinite(highest)).tolist():
            output.sampled[row] = None
            output.failed[row] = NOTHING_LEFT if highest[row] == -np.inf else NOT_FINITE
        return output, event
