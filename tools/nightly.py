"""Seeds that no test has tried: storms, and damages to files, night after night.

Works take turns until the time is over. Each goes on with the seed after its last one, which is kept in a folder, so
that no night repeats another. A command that fails is kept there, too, and fails again when it is run again.

    python -m tools.nightly --minutes 480
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(".nightly")
STATE, FAILURES = "seeds.json", "failures.txt"
FIRST_SEED = 100_000
"""The tests have the seeds below."""
KEPT_CHARS = 4000
"""Of a failed command's output."""


@dataclass(frozen=True)
class Work:
    """A command that tries seeds.

    Attributes:
        name: of the work, in the file of seeds.
        arguments: Python's; `{seed}` stands for the first seed of a turn, and `{seeds}` for their number.
        seeds: that a turn tries.
    """

    name: str
    arguments: str
    seeds: int

    def command(self, seed: int) -> list[str]:
        """The command of a turn that begins with a seed."""
        return [sys.executable, *shlex.split(self.arguments.format(seed=seed, seeds=self.seeds))]


WORKS = (
    Work("storms in virtual time", "-m tests.world.storm --seed {seed} --storms {seeds}", 10),
    Work("storms in the role both", "-m tests.world.storm --both --seed {seed} --storms {seeds}", 10),
    Work("storms with ranks", "-m tests.world.storm --ranks 2 --seed {seed} --storms {seeds}", 10),
    Work("storms of stages on hosts", "-m tests.world.storm --hosts --seed {seed} --storms {seeds}", 10),
    Work("storms of pictures", "-m tests.world.storm --pictures --seed {seed} --storms {seeds}", 10),
    Work("storms over processes", "-m tests.faults --seed {seed} --storms {seeds}", 1),
    Work("storms over ranks", "-m tests.faults --ranks 2 --seed {seed} --storms {seeds}", 1),
    Work("storms over processes in the role both", "-m tests.faults --both --seed {seed} --storms {seeds}", 1),
    Work("files from elsewhere", "-m tests.unit.damaged_files --seed {seed} --count 2000", 1),
    Work("data folders", "-m tests.unit.kvstore.damages --seed {seed} --count {seeds}", 200),
    Work("encrypted data folders", "-m tests.unit.kvstore.damages --encrypted --seed {seed} --count {seeds}", 200),
)


class Seeds:
    """The next seed of each work, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / STATE
        self._next: dict[str, int] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def next(self, work: Work) -> int:
        """The seed with which a work's next turn begins."""
        return self._next.get(work.name, FIRST_SEED)

    def tried(self, work: Work) -> None:
        """A turn of a work is over."""
        self._next[work.name] = self.next(work) + work.seeds
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(self._next, indent=1) + "\n")
        written.replace(self._path)


def run(works: Sequence[Work], folder: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Let works take turns until so much time is over; a turn that has begun is ended. Returns how many failed."""
    seeds, failed, until, turn = Seeds(folder), 0, clock() + seconds, 0
    while clock() < until:
        work = works[turn % len(works)]
        turn += 1
        seed = seeds.next(work)
        command = work.command(seed)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"{work.name}: seeds {seed} to {seed + work.seeds - 1}: {'failed' if done.returncode else 'right'}")
        if done.returncode:
            failed += 1
            with (folder / FAILURES).open("a", encoding="utf-8") as kept:
                kept.write(f"{shlex.join(command[1:])}\n{done.stdout[-KEPT_CHARS:]}\n\n")
        seeds.tried(work)
    return failed


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=480.0, help="no turn is begun after so long")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="with the seeds and the failures")
    parser.add_argument("--only", default="", help="works with this text in their names")
    options = parser.parse_args()
    works = [work for work in WORKS if options.only in work.name]
    if not works:
        parser.error(f"--only: no work has {options.only!r} in its name")
    failed = run(works, options.folder, 60.0 * options.minutes)
    if failed:
        print(f"{failed} failed: see {options.folder / FAILURES}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
