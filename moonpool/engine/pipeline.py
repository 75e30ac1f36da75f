"""The links between stages: hidden states go as a status word, then the tensor, over gloo on this host.

The status word makes an aborted step coherent: whatever happens to a step on one stage, the next one receives exactly
one status word for it, and a tensor only when the word says so. So no stage ever waits for a tensor that will not come.
"""

import datetime
from collections import deque
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moonpool.errors import Internal

_ABORTED = -1  # in place of the number of rows


class Links(Protocol):
    """A stage's neighbours."""

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        """Hidden states [rows, hidden] of a step from the stage before, or None when the step was aborted there."""
        ...

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """Hidden states of a step, or None for an aborted one, to the stage after. Must not be changed any more."""
        ...

    def flush(self) -> None:
        """Waits until everything sent has been received."""
        ...


class NoLinks:
    """Of a single stage."""

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        """There is no stage before."""
        raise AssertionError("a first stage receives nothing")

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """There is no stage after."""

    def flush(self) -> None:
        """Nothing was sent."""


class GlooLinks:
    """Neighbours in a chain of processes on one host.

    A stage may run ahead of the next one by `outstanding` steps: so many sends are left under way.
    """

    def __init__(
        self,
        rendezvous: Path,
        stage: int,
        stages: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        timeout_s: float,
        outstanding: int = 2,
    ) -> None:
        """Meets the other stages in the private folder `rendezvous`; blocks until all are there.

        Args:
            rendezvous: Folder that only these stages use, once.
            stage: This stage.
            stages: Number of stages.
            hidden_size: Columns of the hidden states.
            dtype: Type of the hidden states.
            timeout_s: Longest wait for a neighbour.
            outstanding: Steps whose hidden states may be under way.
        """
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous / 'store'}",
            rank=stage,
            world_size=stages,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self._stage, self._stages = stage, stages
        self._hidden_size, self._dtype = hidden_size, dtype
        self._outstanding = outstanding
        # Sends under way, with the tensors that they keep alive.
        self._under_way: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        """Hidden states of a step from the stage before.

        Raises:
            Internal: The stage before sent another step or shape: the stages have lost each other.
        """
        status = torch.empty(2, dtype=torch.int64)
        dist.recv(status, src=self._stage - 1)
        sent_step, sent_rows = status.tolist()
        if sent_step != step_id or sent_rows not in (rows, _ABORTED):
            raise Internal(f"expected step {step_id} with {rows} rows, stage before sent {sent_step} with {sent_rows}")
        if sent_rows == _ABORTED:
            return None
        hidden = torch.empty((rows, self._hidden_size), dtype=self._dtype)
        dist.recv(hidden, src=self._stage - 1)
        return hidden

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """Starts to send a step's hidden states; waits only when too much is under way."""
        if self._stage + 1 == self._stages:
            return
        while len(self._under_way) >= self._outstanding:
            self._wait_oldest()
        rows = _ABORTED if hidden is None else hidden.shape[0]
        tensors = [torch.tensor([step_id, rows], dtype=torch.int64)]
        if hidden is not None:
            tensors.append(hidden.cpu().contiguous())
        works = [dist.isend(tensor, dst=self._stage + 1) for tensor in tensors]
        self._under_way.append(([work for work in works if work is not None], tensors))

    def flush(self) -> None:
        """Waits until everything sent has been received."""
        while self._under_way:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        works, _ = self._under_way.popleft()
        for work in works:
            work.wait()
