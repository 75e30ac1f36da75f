"""Links between stages in processes of their own, by torch's real groups."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from moonpool.base.errors import Internal, Unavailable
from moonpool.engine.pipeline import StageLinks

FORK = multiprocessing.get_context("fork")
WIDTH = 3


def rows(count: int) -> torch.Tensor:
    return torch.arange(float(count * WIDTH)).view(count, WIDTH)


def first(links: StageLinks, end: Connection) -> None:
    """Three steps, one of them aborted, and one that the next stage does not expect; then it is gone."""
    links.send(1, rows(2))
    links.send(2, None)
    links.send(3, rows(5))
    links.send(4, rows(1))
    end.recv()


def second(links: StageLinks, end: Connection) -> None:
    received = [links.receive(step, count) for step, count in ((1, 2), (2, 4), (3, 5))]
    end.send([None if hidden is None else hidden.tolist() for hidden in received])
    with pytest.raises(Internal) as other:
        links.receive(5, 1)
    end.send(str(other.value))
    with pytest.raises(Unavailable) as lost:
        links.receive(6, 1)
    end.send(str(lost.value))


def run(folder: Path, stage: int, does: Callable[[StageLinks, Connection], None], end: Connection) -> None:
    cpu = torch.device("cpu")
    does(StageLinks(folder, stage, 2, "gloo", device=cpu, hidden_size=WIDTH, dtype=torch.float32, timeout_s=20.0), end)


def test_hidden_states_go_through_and_a_stage_that_is_gone_is_named(tmp_path: Path) -> None:
    processes, ends = [], []
    for stage, does in enumerate((first, second)):
        ours, theirs = FORK.Pipe()
        processes.append(FORK.Process(target=run, args=(tmp_path, stage, does, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    assert ends[1].recv() == [rows(2).tolist(), None, rows(5).tolist()]
    assert ends[1].recv() == "expected step 5 with 1 rows, stage before sent 4 with 1"
    ends[0].send("go")
    assert ends[1].recv().startswith("stage 0 was lost in step 6: ")
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
