"""Writes blocks for ever and prints each key once it is durable; meant to be killed."""

import itertools
import sys
from pathlib import Path

from tests.unit.kvstore.helpers import RECORD, Driven, keys_of, open_ssd


def main() -> None:
    folder, chain = Path(sys.argv[1]), sys.argv[2]
    ssd = open_ssd(folder, capacity=1 << 30, segment=5 * RECORD)
    driven = Driven(ssd)
    keys = keys_of(100_000, chain)
    for start in itertools.count(step=7):
        driven.flush(keys[start : start + 7])
        print("\n".join(key.hex() for key in keys[start : start + 7]), flush=True)


if __name__ == "__main__":
    main()
