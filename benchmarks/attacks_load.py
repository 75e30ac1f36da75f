"""Uses so much of a processor and does nothing else: `python -m benchmarks.attacks_load SHARE`, while its parent lives.

`benchmarks.attacks` runs one beside the calm tenant for each process that an attack kept busy.
"""

import argparse
import os
import time

BURST_S, NAP_S = 0.002, 0.001
"""Processor time without a pause, about as long as a decode step; and the least pause."""


def use(share: float) -> None:
    """Use a share of a processor, until the parent has ended. What was not had while others computed is made up for."""
    began, before, parent = time.monotonic(), time.process_time(), os.getppid()
    while os.getppid() == parent:
        burst_ends = time.process_time() + BURST_S
        while time.process_time() < burst_ends:
            sum(range(1000))
        ahead_s = (time.process_time() - before) / share - (time.monotonic() - began)
        if ahead_s > 0:
            time.sleep(max(ahead_s, NAP_S))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("share", type=float, help="of one processor")
    options = parser.parse_args()
    print("computing", flush=True)
    use(options.share)


if __name__ == "__main__":
    main()
