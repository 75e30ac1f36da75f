"""Ranks with a device each: sums by NCCL between GPUs, or by gloo where two ranks share a device, and in tests.

The backend is made here, without torch's default group, which a pipeline's stages have (`moonpool.engine.pipeline`).
"""

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moonpool.engine.parallel.page import RankPage
from moonpool.engine.parallel.ranks import Ranks


class GroupRanks(Ranks):
    """As `Ranks`; sums, and what ranks give each other, are work on the devices.

    All ranks give their devices the same work in the same order. NCCL adds in the parts' type, as other engines do;
    gloo in float32.

    Args:
        page: the stage's page, as this rank sees the page.
        store: private file by which the ranks find each other; the same for all.
        collectives: backend of `torch.distributed`.
        device: this rank's.
        captured: whether graphs may have this backend's work in them.

    Raises:
        RuntimeError: another rank did not come in time.
    """

    def __init__(self, page: RankPage, store: str, collectives: str, device: torch.device, *, captured: bool) -> None:
        super().__init__(page)
        self.captured, self._device, self._wide = captured, device, collectives == dist.Backend.GLOO
        place, timeout = (
            (FileStore(store, self.ranks), self.rank, self.ranks),
            datetime.timedelta(seconds=page.timeout_s),
        )
        self._group: Any
        if self._wide:
            self._group = dist.ProcessGroupGloo(*place, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(*place, options)

    def sum(self, part: Tensor) -> Tensor:
        total = (part.float() if self._wide else part).contiguous()
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, without the events of another
        work = self._group.allreduce([total], options)
        if work is not None:
            work.wait()
        return total.to(part.dtype)

    def share(self, rows: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        found = torch.empty(shape, dtype=dtype, device=self._device) if rows is None else rows.contiguous()
        self._group.broadcast([found]).wait()
        return found

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        rows, widest = len(part), max(widths)
        own = part.new_zeros(rows, widest)
        own[:, : part.shape[1]] = part
        every = part.new_empty(self.ranks, rows, widest)
        self._group.allgather([list(every.unbind())], [own]).wait()
        if not self.first:
            return part.new_empty(rows, 0)
        return torch.cat([its[:, :width] for its, width in zip(every, widths, strict=True)], dim=1)
