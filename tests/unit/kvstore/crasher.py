"""Writes blocks into a small tier until it is killed, and reports what became of them.

Prints "+KEY" once a block is durable, and "-KEY" before one is given up.
"""

import contextlib
import ctypes
import itertools
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.ssd.admission import SsdAdmission
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from tests.unit.kvstore.helpers import RECORD, block_of, keys_of

PR_SET_PDEATHSIG = 1
BATCH = 7
SEGMENT = 5 * RECORD
CAPACITY = 40 * SEGMENT
KEPT_PER_LIFE = 2
TENANTS = ("a", "b")


def kept_keys(lives: int) -> set[BlockKey]:
    """Blocks that must never go: the first ones of each life."""
    return {key for life in range(lives) for key in keys_of(KEPT_PER_LIFE, str(life))}


def tenant_of(key: BlockKey) -> str:
    return TENANTS[key[0] % len(TENANTS)]


def tell(sign: str, keys: Iterable[BlockKey]) -> None:
    sys.stdout.write("".join(f"{sign}{key.hex()}\n" for key in keys))
    sys.stdout.flush()


def write(ssd: SsdTier, keys: list[BlockKey]) -> None:
    plan = ssd.plan([block_of(key, tenant_of(key)) for key in keys])
    assert not plan.rejected
    tell("-", plan.removed)
    ssd.commit(plan)
    ssd.committed(plan)
    assert not plan.lost
    assert ssd.used_bytes <= CAPACITY
    tell("+", (block.info.key for block in plan.blocks))


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux: a test that is killed leaves no writer behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder, life, durability = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    kept = kept_keys(life + 1)
    ssd = open_tier(
        [folder],
        CAPACITY,
        SEGMENT,
        durability="power" if durability == "power" else "process",
        admission=SsdAdmission(pins=kept),
    )
    keys = keys_of(20_000, str(life))
    for start in itertools.count(step=BATCH):
        write(ssd, keys[start : start + BATCH])
        ssd.catalogue.touch(keys[max(0, start - 90) : start : 3])
        if start % (40 * BATCH) == 0:
            ssd.compact(0.9)


if __name__ == "__main__":
    main()
