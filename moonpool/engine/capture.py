"""Captures work as graphs, on all ranks of a stage or on none: captured sums need the others' graphs, too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.platforms.base import CapturedGraph, Device


@dataclass(frozen=True, slots=True)
class Captures:
    """What came of captures.

    Attributes:
        graphs: of each work, or none.
        failed: why there is none; empty = they had no room, or there are some.
    """

    graphs: Sequence[CapturedGraph] = ()
    failed: str = ""


def capture_all(
    device: Device, works: Sequence[Callable[[], None]], has_room: Callable[[int], bool], ranks: Ranks | None
) -> Captures:
    """Capture each work, within work of the compute stream.

    The works run first, one after the other, so that no kernel is compiled within a capture.

    Args:
        device: captures.
        works: what is captured.
        has_room: counts the graphs' bytes; whether there is room for them.
        ranks: of the stage; None: there are no others.

    Raises:
        RuntimeError: a work failed on a rank: other ranks may wait for its sums, so that they are not captured either.
    """
    found, kept = Captures(), False
    try:
        for work in works:
            work()
    except RuntimeError as error:  # torch's CUDA errors, running out of memory among them
        if ranks is not None:
            raise
        return Captures(failed=str(error))
    try:
        graphs = [device.capture(work) for work in works]
    except RuntimeError as error:
        found = Captures(failed=str(error))
    else:
        kept = has_room(sum(graph.nbytes for graph in graphs))
        found = Captures(graphs) if kept else found
    if ranks is not None and not ranks.all_say(kept):
        return found if found.failed else Captures(failed="another rank has none")
    return found
