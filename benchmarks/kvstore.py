"""The kvstore's figures beside references and peers measured in the same run: `python -m benchmarks.kvstore [--json]`.

Each part is a module (`--only` chooses): the DRAM tier beside raw TCP, beside Mooncake Store and Redis (optional:
`pip install 'moonpool[peers]'` and a `redis-server`), the SSD tier beside plain reads and appends, the first layer of a
long prefix, `MatchPrefix` in a store of a million blocks, and memory under churn, which is drawn too.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import kvstore_churn, kvstore_dram, kvstore_match, kvstore_peers, kvstore_prefix, kvstore_ssd
from benchmarks.frame import Absent, Progress, Row, Skipped, run
from benchmarks.kvstore_client import BLOCK_SIZES, layout_of
from benchmarks.kvstore_ssd import DEPTH
from moonpool.base.rpc.tuning import tune_gc, tune_grpc, tune_malloc

Part = Callable[[argparse.Namespace, Progress], Sequence[Row | Absent] | Coroutine[Any, Any, Sequence[Row]]]

PARTS: dict[str, Part] = {
    "dram": kvstore_dram.measure,
    "peers": kvstore_peers.measure,
    "ssd": kvstore_ssd.measure,
    "prefix": kvstore_prefix.measure,
    "match": kvstore_match.measure,
    "churn": kvstore_churn.measure,
}


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows of the parts that were chosen."""
    if not sys.platform.startswith("linux"):
        raise Skipped("processes are measured through /proc, which only Linux has")
    tune_malloc()
    tune_gc()
    tune_grpc()
    rows: list[Row | Absent] = []
    for name in options.only:
        result = PARTS[name](options, progress)
        rows += uvloop.run(result) if asyncio.iscoroutine(result) else result
    return rows


def sizes(text: str) -> list[int]:
    """Sizes of blocks in KiB, comma-separated.

    Raises:
        argparse.ArgumentTypeError: blocks cannot have one of them.
    """
    try:
        found = [int(part) for part in text.split(",")]
        for kib in found:
            layout_of(kib << 10)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def parts(text: str) -> list[str]:
    """Names of parts, comma-separated.

    Raises:
        argparse.ArgumentTypeError: there is no such part.
    """
    found = text.split(",")
    if unknown := [name for name in found if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return found


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    kib = [size >> 10 for size in BLOCK_SIZES]
    add("--only", type=parts, default=[*PARTS], metavar="A,B", help=f"of the parts {', '.join(PARTS)}; default: all")
    add("--sizes-kib", type=sizes, default=kib, metavar="N,N", help=f"of blocks (default {','.join(map(str, kib))})")
    add("--gigabytes", type=float, default=0.25, help="of each measured stretch of the DRAM tier (default 0.25)")
    add("--peer-megabytes", type=float, default=64.0, help="of each stretch beside the peers (default 64)")
    add(
        "--ssd-gigabytes",
        type=float,
        default=0.75,
        help="read from an SSD tier that holds all (default 0.75)",
    )
    add("--ssd-put-gigabytes", type=float, help="put into a full SSD tier (default: as many as are read)")
    add("--ssd-tier-gigabytes", type=float, help="that the tier holds (default: a third of what is put)")
    add("--ssd-threads", type=int, default=DEPTH, help=f"that read the SSD tier, and the plain file (default {DEPTH})")
    add("--folder", type=Path, help="where SSD tiers lie while they are measured (default: the temporary folder)")
    add("--blocks", type=int, default=1_000_000, help="of the store that is asked for prefixes (default 1,000,000)")
    add("--churn-s", type=float, default=20.0, help="seconds of churn (default 20; the proof takes 600)")
    add("--churn-megabytes", type=int, default=1024, help="DRAM budget of the store that is churned (default 1024)")


if __name__ == "__main__":
    run("kvstore", measure, flags=flags)
