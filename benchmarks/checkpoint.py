"""Loading SmolLM2 from the GGUF file, beside transformers and the `gguf` package: `python -m benchmarks.checkpoint`.

Each load runs in a separate process, so that the peak is the load's own. Imports are in the peak, and not in the time
but where transformers makes them late.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Absent, Progress, Row, Skipped, paired, run
from moonpool.base.checkpoint.named_models import cache_folder, cached_model

_FRAME = """
import json, resource, sys, time
from pathlib import Path
{imports}
path = Path(sys.argv[1])
begin = time.perf_counter()
{work}
seconds = time.perf_counter() - begin
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""
_TRANSFORMERS = (
    "import torch\nfrom transformers import AutoModelForCausalLM",
    "kept = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)",
)
_OURS = (
    "import torch\nfrom moonpool.base.checkpoint import load_config\n"
    "from moonpool.engine.models.loader import load_stage",
    "config = load_config(path)\nkept = load_stage(path, config, torch.bfloat16, 0, config.num_layers)",
)
_HEADER = ("from moonpool.base.checkpoint.gguf import GgufFile", "GgufFile.read(path)")
_READER = ("from gguf import GGUFReader", "GGUFReader(path)")
_TOKENIZER = ("from moonpool.base.checkpoint import Tokenizer", "Tokenizer.load(path)")
_THEIRS = ("from transformers import AutoTokenizer", "AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)")

Code = tuple[str, str]
"""Imports, and the statements that are timed."""


def timed(code: Code, path: Path) -> tuple[float, float]:
    """Seconds that a process needs for the statements, and the most memory held, MiB."""
    program = _FRAME.format(imports=code[0], work=code[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, env=environment
    )
    seconds, peak_mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak_mib


def measure(options: argparse.Namespace, progress: Progress) -> Sequence[Row | Absent]:
    """See `benchmarks.frame.Measure`."""
    path = cached_model("smollm2", cache_folder())
    if path is None:
        raise Skipped("SmolLM2 is not here (`moonpool pull smollm2`)")
    rows: list[Row | Absent] = []
    for name, ours, theirs, whose in (
        ("header", _HEADER, _READER, "gguf's reader"),
        ("tokenizer", _TOKENIZER, _THEIRS, "transformers"),
        ("weights, bfloat16, one thread", _OURS, _TRANSFORMERS, "transformers"),
    ):
        runs = []
        for number in range(options.runs):
            runs.append((timed(ours, path), timed(theirs, path)))
            progress(f"{name}, run {number + 1}")
        times = [(our[0], their[0]) for our, their in runs]
        rows.append(paired(f"SmolLM2 (GGUF, Q4_1): {name}", "s", times, whose, less_is_better=True))
    peaks = [(our[1], their[1]) for our, their in runs]
    rows.append(paired("SmolLM2 (GGUF, Q4_1): peak of loading it", "MiB", peaks, "transformers", less_is_better=True))
    return rows


if __name__ == "__main__":
    run("checkpoint", measure)
