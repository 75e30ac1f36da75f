"""Moonpool's kvstore on each transport beside Mooncake Store and Redis: the same blocks, one and sixteen at a time.

Every store and every client runs in a separate process; an operation begins when the one before has ended. In each run
all stores do the same, one after the other. A peer that is not installed is named as not measured. gRPC alone is
measured too: the difference to it is the store's own time.
"""

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.frame import Absent, Progress, Row, Skipped, paired
from benchmarks.peers.contract import Store
from benchmarks.peers.driver import MEMORY_BYTES, MODULES, Driver, store_of

TARGET = 1.2
TCP_TARGET, TCP_FROM_BYTES = 1.0, 256 << 10
OURS = "moonpool"
"""Over the local transport."""
TCP = "moonpool-tcp"
OTHER_TRANSPORTS = (TCP, "moonpool-grpc")
FLOOR = "grpc"
"""Not a peer: the same bytes over gRPC without a store."""
BATCHES = (1, 16)
STORE_BYTES = 1 << 30
WARM_FROM_BYTES = 32 << 20
"""Stretches of at least this size begin with memory that was touched."""
MIN_OPERATIONS = 4
MAX_OPERATIONS = 1000
BETTER = "the better of the peers"

Speeds = Mapping[str, Sequence[float]]
"""Store -> GB/s of each run."""


def operations(nbytes: int, block_bytes: int, batch: int) -> int:
    """The number of operations that move about `nbytes`, within bounds."""
    return max(MIN_OPERATIONS, min(MAX_OPERATIONS, nbytes // (block_bytes * batch)))


def name_of(verb: str, block_bytes: int, batch: int) -> str:
    """Of a figure."""
    how = "one at a time" if batch == 1 else f"{batch} at a time"
    return f"{verb.capitalize()}, blocks of {block_bytes >> 10} KiB, {how}"


def target_of(store: str, block_bytes: int) -> float | None:
    """What is wanted of our store on one of its transports beside the better of the peers."""
    if store == TCP:
        return TCP_TARGET if block_bytes >= TCP_FROM_BYTES else None
    return TARGET if store == OURS else None


def rows_of(
    name: str,
    speeds: Speeds,
    missing: Mapping[str, str],
    titles: Mapping[str, str],
    *,
    own: str = OURS,
    target: float | None = TARGET,
) -> list[Row | Absent]:
    """A row beside each peer, and a row beside the better peer, which has the target.

    Args:
        name: the figure's name.
        speeds: our store's and the present peers'.
        missing: peers that are not, and why.
        titles: names of all.
        own: which transport of ours.
        target: the figure's target.
    """
    ours = speeds[own]
    others = {store: values for store, values in speeds.items() if store not in (OURS, *OTHER_TRANSPORTS)}
    rows: list[Row | Absent] = [
        paired(name, "GB/s", list(zip(ours, others[store], strict=True)), titles[store]) for store in others
    ]
    peers = {store: values for store, values in others.items() if store != FLOOR}
    rows += [Absent(name, titles[store], reason) for store, reason in missing.items()]
    if missing:
        return [*rows, Absent(name, BETTER, "; ".join(missing.values()))]
    best = [max(values) for values in zip(*peers.values(), strict=True)]
    return [*rows, paired(name, "GB/s", list(zip(ours, best, strict=True)), BETTER, target=target)]


@contextlib.contextmanager
def drivers(
    progress: Progress, stores: Mapping[str, Store] | None = None
) -> Iterator[tuple[dict[str, Driver], dict[str, str], dict[str, str]]]:
    """A driver of each store that is installed, the reasons why others are missing, and all titles."""
    if stores is None:
        stores = {store: store_of(store) for store in MODULES}
    found: dict[str, Driver] = {}
    missing: dict[str, str] = {}
    titles: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for store, module in stores.items():
            titles[store] = module.NAME
            try:
                address = stack.enter_context(module.running(STORE_BYTES))
                found[store] = stack.enter_context(Driver(store, address))
            except Skipped as reason:
                missing[store] = str(reason)
                progress(f"{module.NAME} is not measured: {reason}")
        yield found, missing, titles


def speeds_of(
    found: Mapping[str, Driver], seed: str, block_bytes: int, batch: int, nbytes: int
) -> dict[str, dict[str, float]]:
    """One run: every store puts, then every store gets the same. Verb -> store -> GB/s."""
    count = operations(nbytes, block_bytes, batch)
    arguments: dict[str, object] = {"seed": seed, "block_bytes": block_bytes, "batch": batch, "operations": count}
    moved = count * batch * block_bytes / 1e9
    speeds: dict[str, dict[str, float]] = {}
    for verb in ("put", "get"):
        speeds[verb] = {store: moved / driver.do(verb, **arguments) for store, driver in found.items()}
    for driver in found.values():
        driver.do("check", block_bytes=block_bytes, batch=batch)
        driver.do("clear")
    return speeds


def warm_up(found: Mapping[str, Driver], block_bytes: int, batch: int, nbytes: int) -> None:
    """All the stores' memory has held blocks with this size; the first touch of memory costs more than a block."""
    fill = STORE_BYTES if nbytes >= WARM_FROM_BYTES and batch == 1 else nbytes // 2
    whole = min(BATCHES[-1], MEMORY_BYTES // block_bytes)
    seed, left = f"warm-{block_bytes}-{batch}", fill
    while left > 0:
        count = min(MAX_OPERATIONS, max(1, left // (block_bytes * whole)))
        left -= count * block_bytes * whole
        for driver in found.values():
            driver.do("put", seed=f"{seed}-{left}", block_bytes=block_bytes, batch=whole, operations=count)
    for driver in found.values():
        driver.do("clear")
    speeds_of(found, seed, block_bytes, batch, nbytes // 4)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows of this part."""
    nbytes = int(options.peer_megabytes * 1e6)
    rows: list[Row | Absent] = []
    with drivers(progress) as (found, missing, titles):
        for size in (kib << 10 for kib in options.sizes_kib):
            for batch in BATCHES:
                if size * batch > MEMORY_BYTES:
                    continue
                warm_up(found, size, batch, nbytes)
                runs = [speeds_of(found, f"{size}-{batch}-{run}", size, batch, nbytes) for run in range(options.runs)]
                for verb in ("put", "get"):
                    speeds = {store: [run[verb][store] for run in runs] for store in found}
                    name = name_of(verb, size, batch)
                    for own in (OURS, *OTHER_TRANSPORTS):
                        target = target_of(own, size)
                        rows += rows_of(f"{name}, {titles[own]}", speeds, missing, titles, own=own, target=target)
                        progress(_said(rows[-1]))
    return rows


def _said(row: Row | Absent) -> str:
    if isinstance(row, Absent):
        return f"{row.name}: not measured beside {row.limit_name}"
    return f"{row.name}: {row.value:.2f} GB/s, {row.ratio:.2f} of {row.limit_name} ({row.limit_value:.2f})"
