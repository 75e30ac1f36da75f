"""Eviction policies on traces: hit shares, beside LRU's and Belady's optimum.

`python -m benchmarks.eviction` compares all policies on every trace there is: the public conversation trace where
`--trace FILE` or the environment names it, the shipped trace, and three generated ones. The hit share covers all block
references in one pool; a request's hits stop at the first miss. Only full blocks are counted, as a store holds no
others; with `--blocks all` the part-filled last block of each request is counted too. A replay is deterministic.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.frame import Absent, Progress, Row, Skipped, run
from moonpool.kvstore.eviction.policies import LRU
from moonpool.simulator.eviction import optimum, replay, replay_sessions
from moonpool.simulator.experiments.prefix_caching import BLOCKS, COMPARED, UNBOUNDED, Chains, chains_in
from moonpool.simulator.traces.agentic import AgenticMix, AgenticWorkload
from moonpool.simulator.traces.mooncake import TraceError, read_trace
from moonpool.simulator.traces.workload import Workload

TRACES_VARIABLE = "MOONPOOL_TRACES"
PUBLIC = "conversation"
TRACE_NAME = f"{PUBLIC}_trace.jsonl"
"""The file taken from the folder that the environment names."""
SHIPPED = Path(__file__).parent / "traces" / "generated.jsonl"
SEEDS = (1, 2, 3)
GENERATED_REQUESTS = 6000
AGENTIC_BLOCKS = 10_000
SESSIONS_PER_S = 0.04
"""Sessions of agents that begin in a second: twice the generator's default, so that 10,000 blocks are too few."""
CAPACITIES = (0, 100_000, 50_000, 30_000, 10_000, 3_000, 1_000, 300)


def trace_file(given: Path | None) -> Path:
    """The public trace, by the option or by the environment.

    Raises:
        Skipped: neither names one.
    """
    if given is not None:
        return given
    folder = os.environ.get(TRACES_VARIABLE)
    if not folder:
        raise Skipped(f"needs a trace: --trace FILE, or {TRACES_VARIABLE}, a folder with {TRACE_NAME}")
    return Path(folder) / TRACE_NAME


def read_chains(path: Path, blocks: str = "full") -> Chains:
    """A trace's requests as chains of block keys.

    Raises:
        Skipped: the trace cannot be read.
    """
    try:
        return chains_in(read_trace(path), blocks)
    except TraceError as error:
        raise Skipped(str(error)) from error


def rows_of(
    trace: str, chains: Chains, policies: Sequence[str], capacities: Sequence[int], progress: Progress
) -> Iterator[Row]:
    """Every policy's and the optimum's hit share at every capacity that binds, beside LRU's."""
    different = len({key for chain in chains for key in chain})
    for capacity in (size for size in capacities if size < different):
        lru = replay(chains, LRU(), capacity)
        where = f"{trace}, {f'{capacity} blocks' if capacity else 'no bound'}"
        for policy in (*policies, "optimum"):
            if policy == "optimum":
                share = optimum(chains, capacity)
            else:
                share = lru if policy == "lru" else replay(chains, COMPARED[policy](), capacity)
            progress(f"{where}, {policy}: {share:.4f}, {share - lru:+.4f} to lru")
            yield Row(f"{where}, {policy}", share, "hit share", 0.0, "lru", lru, share / lru if lru else 1.0)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    policies, capacities = options.policies, options.capacities
    rows = of_traces(
        options, "policies", "lru", lambda trace, chains: rows_of(trace, chains, policies, capacities, progress)
    )
    for seed in SEEDS if options.sessions else ():
        rows += session_rows(seed, options.sessions, progress)
    return rows


def session_rows(seed: int, sessions: int, progress: Progress) -> Iterator[Row]:
    """On a trace of agents at 10,000 blocks: LRU and `kv-aware`, and LRU if clients tell of their sessions.

    The ratio is the part of the way from LRU to the optimum.
    """
    requests = AgenticWorkload(seed, AgenticMix(sessions_per_s=SESSIONS_PER_S)).requests(sessions)
    chains, capacity = chains_in(requests), AGENTIC_BLOCKS
    lru, best = replay(chains, LRU(), capacity), optimum(chains, capacity)
    told: dict[str, Callable[[], float]] = {
        "kv-aware": lambda: replay(chains, COMPARED["kv-aware"](), capacity),
        "lru, sessions' ends told": lambda: replay_sessions(requests, chains, LRU(), capacity, returns=False),
        "lru, ends and returns told": lambda: replay_sessions(requests, chains, LRU(), capacity, returns=True),
        "optimum": lambda: best,
    }
    for name, share_of in told.items():
        share = share_of()
        progress(f"agents {seed}, {name}: {share:.4f}, LRU {lru:.4f}, optimum {best:.4f}")
        closed = (share - lru) / (best - lru) if best > lru else 1.0
        yield Row(f"agents {seed}, {capacity} blocks, {name}", share, "hit share", 0.0, "lru", lru, closed)


def of_traces(
    options: argparse.Namespace, of: str, limit: str, rows_of: Callable[[str, Chains], Iterable[Row]]
) -> list[Row | Absent]:
    """The rows for each chosen trace, by name and chains; one that is absent, of all `of`, if it is."""
    rows: list[Row | Absent] = []
    for trace in options.traces:
        try:
            chains = _chains_of(trace, options)
        except Skipped as reason:
            rows.append(Absent(f"{trace} trace, all {of}", limit, str(reason)))
        else:
            rows += rows_of(trace, chains)
    return rows


def _chains_of(trace: str, options: argparse.Namespace) -> Chains:
    """The chains in one of `TRACES`, with the flags from `trace_flags`; raises Skipped if the trace cannot be read."""
    if trace == PUBLIC:
        return read_chains(trace_file(options.trace), options.blocks)
    if trace == "shipped":
        return read_chains(SHIPPED, options.blocks)
    seed = int(trace.removeprefix("generated-"))
    return chains_in(Workload(seed).requests(GENERATED_REQUESTS), options.blocks)


TRACES = (PUBLIC, "shipped", *(f"generated-{seed}" for seed in SEEDS))


def trace_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose traces."""
    add = parser.add_argument
    add("--trace", type=Path, help=f"the public trace's file; default: {TRACE_NAME} in ${TRACES_VARIABLE}")
    add("--traces", type=_names(TRACES), default=TRACES, help=f"of {','.join(TRACES)} (default: all)")
    add("--blocks", choices=BLOCKS, default="full", help="count full blocks only, or all")


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    trace_flags(parser)
    add = parser.add_argument
    add("--policies", type=_names(tuple(COMPARED)), default=tuple(COMPARED), help=f"of {','.join(COMPARED)}")
    add("--sessions", type=int, default=60, help="sessions of the traces of agents; 0 = none of these traces")
    add("--capacities", type=_capacities, default=CAPACITIES, help=f"in blocks; {UNBOUNDED} for no bound")


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return tuple(text.split(","))

    return names


def _capacities(text: str) -> tuple[int, ...]:
    sizes = tuple(0 if part == UNBOUNDED else int(part) for part in text.split(","))
    if any(size <= 0 for size, part in zip(sizes, text.split(","), strict=True) if part != UNBOUNDED):
        raise argparse.ArgumentTypeError("capacities are positive")
    return sizes


if __name__ == "__main__":
    run("eviction", measure, flags=flags)
