"""A folder with recordings: how to record, and how to compare two folders."""

import gzip
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tools.decisions.places import machines
from tools.decisions.recorder import Recording, recorded
from tools.decisions.scenarios import SCENARIOS
from tools.decisions.walks import walk

DIGESTS = "digests.json"
_CLASS = re.compile(r"#(\d+)")


def record(out: Path, only: str, seeds: int, walks: int, jobs: int) -> int:
    """Run every scenario with `only` in the name."""
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*SCENARIOS, *(f"walk-{name}" for name in machines())) if only in name]
    todo = [(name, seed) for name in names for seed in range(1, seeds + 1)]
    found: dict[str, Recording] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:  # forked ones would share mapped memory
        for name, recording, seconds in pool.map(partial(_record, out, walks), todo):
            found[name] = recording
            print(f"{name:28} {recording.pairs:8,} pairs {seconds:6.1f} s", *recording.wrong, sep="\n  ", flush=True)
    digests = {name: asdict(recording) for name, recording in found.items()}
    (out / DIGESTS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} recordings, {sum(recording.pairs for recording in found.values()):,} pairs")
    return 0


def _record(out: Path, walks: int, what: tuple[str, int]) -> tuple[str, Recording, float]:
    (name, seed), begun = what, time.perf_counter()
    with recorded(_file(out, f"{name}-{seed}")) as recorder:
        if name in SCENARIOS:
            with recorder.part(f"{seed}"):
                SCENARIOS[name].run(seed)
        else:
            for number in range(walks):
                with recorder.part(f"{seed}/{number}"):
                    walk(name.removeprefix("walk-"), seed, number, recorder)
    return f"{name}-{seed}", recorder.close(), time.perf_counter() - begun


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.txt.gz"


def compare(first: Path, second: Path, *, loose: bool) -> int:
    """Show the first pair of each recording that is not the same in both; some may be missing in the second folder."""
    before, after = (json.loads((folder / DIGESTS).read_text(encoding="utf-8")) for folder in (first, second))
    both = [name for name in after if name in before]
    different = [name for name in both if not _same(name, (first, second), (before[name], after[name]), loose=loose)]
    print(f"{len(both) - len(different)} of {len(both)} recordings are the same")
    if len(both) < max(len(before), len(after)):
        print(f"{len(before) - len(both)} are in {first} only, {len(after) - len(both)} in {second} only")
    return 1 if different or len(both) < len(after) else 0


def _same(name: str, folders: tuple[Path, Path], sides: tuple[dict[str, Any], ...], *, loose: bool) -> bool:
    if sides[0]["sha256"] == sides[1]["sha256"]:
        return True
    pairs = [_pairs(_file(folder, name)) for folder in folders]
    for place, (left, right) in enumerate(zip_longest(*pairs, fillvalue="nothing\n")):
        if left != right and not (loose and _CLASS.sub("#", left) == _CLASS.sub("#", right)):
            print(f"{name}: pair {place} differs")
            for sign, text, side in zip("-+", (left, right), sides, strict=True):
                print("".join(f"{sign} {line}\n" for line in _named(text, side["classes"]).splitlines()), end="")
            return False
    return loose


def _named(text: str, classes: list[str]) -> str:
    return _CLASS.sub(lambda found: classes[int(found[1])], text)


def _pairs(path: Path) -> Iterator[str]:
    """Lines that are indented belong to the one before."""
    pair = ""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if not line.startswith(" "):
                if pair:
                    yield pair
                pair = ""
            pair += line
    yield pair
