"""Eviction policies on a trace: hit shares, beside LRU's and beside Belady's optimum.

`python -m benchmarks.eviction --trace FILE --policies a,b --capacities 10000,30000 --json`. The hit share is that of
all block references of the trace, in one pool of so many blocks; a request's hits stop at its first miss. The place of
a policy is 0 where LRU is and 1 where the optimum is. A replay has no noise: `--runs` does not matter.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.frame import Progress, Row, Skipped, run
from benchmarks.replay import chains_of, optimum, replay
from moonpool.kv.keys import BlockKey
from services.kvstore.policies.policy import LRU, POLICIES, EvictionPolicy
from tests.load.mooncake import read_trace

TRACES_VARIABLE = "MOONPOOL_TRACES"
TRACE_NAME = "conversation_trace.jsonl"
"""The trace taken from the folder that the environment names."""
GENERATED = Path(__file__).parent / "traces" / "generated.jsonl"
CAPACITIES = (0, 100_000, 50_000, 30_000, 10_000, 1_000)
ALLOWED_LOSS = 0.001
"""How far our own policy's hit share may be below LRU's anywhere."""

COMPARED: Mapping[str, Callable[[], EvictionPolicy]] = {
    **POLICIES,
    "lru-head-first": lambda: LRU(tail_first=False),
}
"""Policies by name; beside those that a store can be given, ones for comparison."""
OURS = "kv-aware"
UNBOUNDED = "inf"


def trace_file(given: Path | None) -> Path:
    """The trace asked for, by the option or by the environment.

    Raises:
        Skipped: there is none.
    """
    if given is not None:
        return given
    folder = os.environ.get(TRACES_VARIABLE)
    if not folder:
        raise Skipped(f"needs a trace: --trace FILE, or {TRACES_VARIABLE}, a folder with {TRACE_NAME}")
    return Path(folder) / TRACE_NAME


def read_chains(path: Path) -> list[list[BlockKey]]:
    """A trace's requests as chains of block keys.

    Raises:
        Skipped: it cannot be read.
    """
    try:
        return chains_of([request.hash_ids for request in read_trace(path)])
    except (OSError, ValueError, KeyError) as error:
        raise Skipped(f"{path}: {error}") from error


def rows_of(
    chains: Sequence[Sequence[BlockKey]], policies: Sequence[str], capacities: Sequence[int], progress: Progress
) -> list[Row]:
    """Two rows for each policy and capacity: its hit share beside LRU's, and its place between LRU and the optimum."""
    rows: list[Row] = []
    for capacity in capacities:
        lru, best = replay(chains, LRU(), capacity), optimum(chains, capacity)
        where = f"{capacity} blocks" if capacity else "no bound"
        rows.append(Row(f"optimum, {where}", best, "hit share", 0.0, "lru", lru, _ratio(best, lru)))
        for policy in policies:
            share = lru if policy == "lru" else replay(chains, COMPARED[policy](), capacity)
            place = (share - lru) / (best - lru) if best > lru else 1.0
            name = f"{policy}, {where}"
            target = max(0.0, 1 - ALLOWED_LOSS / lru) if policy == OURS and lru else None
            rows.append(Row(name, share, "hit share", 0.0, "lru", lru, _ratio(share, lru), target))
            rows.append(Row(f"{name}, place", place, "from lru to optimum", 0.0, "optimum", 1.0, place))
            progress(f"{name}: {share:.4f}, {share - lru:+.4f} to lru, place {place:+.3f}")
    return rows


def _ratio(share: float, beside: float) -> float:
    return share / beside if beside else 1.0


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    path = GENERATED if options.generated else trace_file(options.trace)
    return rows_of(read_chains(path), options.policies, options.capacities, progress)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--trace", type=Path, help=f"in Mooncake's form; default: {TRACE_NAME} in ${TRACES_VARIABLE}")
    parser.add_argument("--generated", action="store_true", help="take the small trace that comes with the benchmarks")
    names = ",".join(COMPARED)
    parser.add_argument("--policies", type=_policies, default=tuple(COMPARED), help=f"of {names} (default: all)")
    parser.add_argument(
        "--capacities", type=_capacities, default=CAPACITIES, help=f"in blocks; {UNBOUNDED} for no bound"
    )


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in COMPARED:
            raise argparse.ArgumentTypeError(f"no policy {name!r}; there are {', '.join(COMPARED)}")
    return names


def _capacities(text: str) -> tuple[int, ...]:
    sizes = tuple(0 if part == UNBOUNDED else int(part) for part in text.split(","))
    if any(size <= 0 for size, part in zip(sizes, text.split(","), strict=True) if part != UNBOUNDED):
        raise argparse.ArgumentTypeError("capacities are positive")
    return sizes


if __name__ == "__main__":
    run("eviction", measure, flags=flags)
