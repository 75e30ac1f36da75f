"""`python -m tools.decisions record --out DIR`, and `compare DIR1 DIR2`, which exits with 1 where decisions differ.

DIR gets a compressed text for each scenario and seed, and `digests.json`, with each text's hash, number of pairs and
classes. The same commit writes the same hashes, whatever `PYTHONHASHSEED` is.

Classes, fields, functions and files may be renamed and moved between two recordings (see `canon`); imports from cores
and test machines are in `places`, imports from the simulator in `scenarios`. Walks depend on the rules of the tests'
machines
too: where these change, record the older commit anew with the newer tests.
"""

import argparse
import sys
from pathlib import Path

from tools.decisions.corpus import compare, record


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tools.decisions", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run the scenarios and walks, and write what cores decide")
    recording.add_argument("--out", type=Path, required=True, help="folder that is written")
    recording.add_argument("--only", default="", help="recordings whose names have this in them")
    recording.add_argument("--seeds", type=int, default=3, help="of each scenario and each kind of walk")
    recording.add_argument("--walks", type=int, default=70, help="of each kind for each seed")
    recording.add_argument("--jobs", type=int, default=2, help="processes side by side")
    comparing = verbs.add_parser("compare", help="show the first difference of each recording")
    comparing.add_argument("folders", type=Path, nargs=2)
    comparing.add_argument("--loose", action="store_true", help="do not tell classes apart, where two became one")
    options = parser.parse_args()
    if options.verb == "record":
        return record(options.out, options.only, options.seeds, options.walks, options.jobs)
    return compare(*options.folders, loose=options.loose)


if __name__ == "__main__":
    sys.exit(main())
