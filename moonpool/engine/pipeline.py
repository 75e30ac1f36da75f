"""The links between stages. On one host hidden states go as a status word, then the tensor.

The status word makes an aborted step coherent: whatever happens to a step on one stage, the next stage receives exactly
one status word for the step, and a tensor only if the word says so. So no stage ever waits for a tensor that will not
come. Status words go over gloo, as the host looks at them. Tensors go over NCCL if each stage has a separate GPU, else
over gloo, from the host. NCCL, between two GPUs, never ran.

A lost neighbour is noticed by the next status word. Between the word and the tensor NCCL notices nothing, and the
compute stream stands still: then the I/O process, whose channel to the lost stage has closed, ends this stage.

Between hosts, hidden states go through the I/O process (`ChannelLinks`).
"""

import contextlib
import datetime
import queue
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moonpool.base.errors import Internal, Unavailable
from moonpool.engine.messages import HiddenStates
from moonpool.engine.platforms.registry import HOST_COLLECTIVES

ABORTED = -1  # in place of the number of rows
_GREETING = -(1 << 62)  # id of no step


class Links(Protocol):
    """A stage's neighbours."""

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        """Return hidden states [rows, hidden] of a step from the stage before; None if the step was aborted there."""
        ...

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """Send a step's hidden states, or None for an aborted step, to the stage after. They must not change."""
        ...

    def flush(self) -> None:
        """Wait until everything sent has been received."""
        ...


class NoLinks:
    """The neighbours of a single stage: none."""

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        raise AssertionError("a first stage receives nothing")

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """There is no stage after."""

    def flush(self) -> None:
        """No send is pending."""


class ChannelLinks:
    """The neighbours of a stage whose hidden states go through the I/O process.

    Args:
        stage: this stage.
        stages: number of stages.
        received: what comes from the stage before, in order.
        emit: gives hidden states to the I/O process; None for a rank that is not the stage's first.
        hidden_size: columns of the hidden states.
        dtype: their type.
        timeout_s: longest wait for the stage before.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        received: "queue.Queue[HiddenStates]",
        emit: Callable[[HiddenStates], None] | None,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        self._stage, self._last = stage, stage + 1 == stages
        self._received, self._emit = received, emit
        self._hidden_size, self._dtype, self._timeout_s = hidden_size, dtype, timeout_s

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        """Return hidden states of a step from the stage before.

        Raises:
            Internal: the stage before sent another step or shape: the stages have lost each other.
            Unavailable: nothing came in time.
        """
        try:
            found = self._received.get(timeout=self._timeout_s)
        except queue.Empty:
            raise Unavailable(f"stage {self._stage - 1} sent nothing in step {step_id}") from None
        if found.step_id != step_id or found.rows not in (rows, ABORTED):
            raise Internal(
                f"expected step {step_id} with {rows} rows, stage before sent {found.step_id} with {found.rows}"
            )
        if found.rows == ABORTED:
            return None
        needed = rows * self._hidden_size * self._dtype.itemsize
        if len(found.data) != needed:
            raise Internal(f"step {step_id} needs {needed} bytes of hidden states, stage before sent {len(found.data)}")
        return torch.frombuffer(bytearray(found.data), dtype=self._dtype).view(rows, self._hidden_size)

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """Give a step's hidden states to the I/O process."""
        if self._last or self._emit is None:
            return
        if hidden is None:
            self._emit(HiddenStates(step_id, ABORTED, b""))
            return
        data = hidden.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        self._emit(HiddenStates(step_id, hidden.shape[0], data))

    def flush(self) -> None:
        """The I/O process has all that was sent."""


class StageLinks:
    """The neighbours of a stage in a chain of processes on one host.

    A stage may run ahead of the next stage by `outstanding` steps, with as many sends under way.
    """

    def __init__(
        self,
        rendezvous: Path,
        stage: int,
        stages: int,
        collectives: str,
        *,
        device: torch.device,
        hidden_size: int,
        dtype: torch.dtype,
        timeout_s: float,
        outstanding: int = 2,
    ) -> None:
        """Meet the other stages in the private folder `rendezvous`; block until all are there and have been heard.

        Args:
            rendezvous: Folder that only these stages use, once.
            stage: This stage.
            stages: Number of stages.
            collectives: Backend that sends the hidden states.
            device: Of the hidden states; `HOST_COLLECTIVES` sends them from the host.
            hidden_size: Columns of the hidden states.
            dtype: Type of the hidden states.
            timeout_s: Longest wait for a neighbour.
            outstanding: Steps whose hidden states may be under way.

        Raises:
            Unavailable: A neighbour is not there in time, or is lost.
        """
        self._stage, self._stages = stage, stages
        self._hidden_size, self._dtype = hidden_size, dtype
        self._outstanding = outstanding
        # Sends under way, with the tensors that they keep alive.
        self._under_way: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        self._device = torch.device("cpu") if collectives == HOST_COLLECTIVES else device
        timeout = datetime.timedelta(seconds=timeout_s)
        with self._heard("another stage"):
            dist.init_process_group(
                HOST_COLLECTIVES,
                init_method=f"file://{rendezvous / 'store'}",
                rank=stage,
                world_size=stages,
                timeout=timeout,
            )
            self._tensors = dist.new_group(backend=collectives, timeout=timeout)
        self._greet()

    def _greet(self) -> None:
        """Send one row through the chain: what cannot be linked is found now, not by the first request."""
        if self._stage:
            self.receive(_GREETING, 1)
        self.send(_GREETING, torch.zeros(1, self._hidden_size, dtype=self._dtype))
        self.flush()

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        """Return hidden states of a step from the stage before.

        Raises:
            Internal: The stage before sent another step or shape: the stages have lost each other.
            Unavailable: The stage before is lost.
        """
        status = torch.empty(2, dtype=torch.int64)
        with self._heard(f"stage {self._stage - 1}", step_id):
            dist.recv(status, src=self._stage - 1)
        sent_step, sent_rows = status.tolist()
        if sent_step != step_id or sent_rows not in (rows, ABORTED):
            raise Internal(f"expected step {step_id} with {rows} rows, stage before sent {sent_step} with {sent_rows}")
        if sent_rows == ABORTED:  # no tensor follows
            return None
        hidden = torch.empty((rows, self._hidden_size), dtype=self._dtype, device=self._device)
        with self._heard(f"stage {self._stage - 1}", step_id):
            dist.recv(hidden, src=self._stage - 1, group=self._tensors)
        return hidden

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        """Start to send a step's hidden states; wait only when too much is under way.

        Raises:
            Unavailable: The stage after is lost.
        """
        if self._stage + 1 == self._stages:
            return
        while len(self._under_way) >= self._outstanding:  # each send keeps its tensors in memory
            self._wait_oldest()
        # One status word for each step, also for an aborted one: else the next stage would wait without end (ADR 2).
        status = torch.tensor([step_id, ABORTED if hidden is None else hidden.shape[0]], dtype=torch.int64)
        tensors = [status] if hidden is None else [status, hidden.to(self._device).contiguous()]
        with self._heard(f"stage {self._stage + 1}", step_id):
            works = [
                dist.isend(tensor, dst=self._stage + 1, group=group)
                for tensor, group in zip(tensors, (None, self._tensors), strict=False)
            ]
        self._under_way.append(([work for work in works if work is not None], tensors))

    def flush(self) -> None:
        """Wait until everything sent has been received."""
        while self._under_way:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        works, _ = self._under_way.popleft()
        with self._heard(f"stage {self._stage + 1}"):
            for work in works:
                work.wait()

    @contextlib.contextmanager
    def _heard(self, neighbour: str, step_id: int | None = None) -> Iterator[None]:
        """Turn torch's errors about a lost or silent neighbour into `Unavailable`, with the neighbour's name."""
        try:
            yield
        except RuntimeError as error:  # as `torch.distributed.DistBackendError` is
            when = "" if step_id is None or step_id == _GREETING else f" in step {step_id}"
            raise Unavailable(f"{neighbour} was lost{when}: {error}") from error
