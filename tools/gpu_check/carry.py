"""Fetches wheels for a machine with a GPU and no network: `python -m tools.gpu_check.carry --into DIR`.

The machine is expected to have Python 3.12, torch, triton, numpy, transformers and pytest with xdist. Versions are
those of constraints.txt. Prints the bytes that travel, and the lines to run on the machine.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = (
    *("annotated-types", "blake3", "cffi", "cryptography", "gguf", "grpcio", "grpcio-health-checking"),
    *("grpcio-reflection", "httptools", "llguidance", "lmdb", "math-core", "msgspec", "nh3", "protobuf", "pycparser"),
    *("pydantic", "pydantic-core", "pydantic-settings", "pytest-asyncio", "python-dotenv", "python-multipart"),
    *("setproctitle", "starlette", "structlog", "typing-extensions", "typing-inspection", "uvicorn"),
)
"""Distributions that are carried. Their dependencies are named here too: nothing else is fetched."""
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64"]
LIMIT_MIB = 64
LINES = """\
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site {folder}/*.whl
export PYTHONPATH=/tmp/site:$PWD"""
"""What installs the wheels on the machine, in the repository's root."""


def pins(names: Sequence[str], constraints: str) -> list[str]:
    """NAME==VERSION of each name, as constraints.txt says.

    Raises:
        ValueError: a name has no exact version there.
    """
    known = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, flags=re.MULTILINE))
    versions = {_normal(name): version for name, version in known.items()}
    absent = [name for name in names if _normal(name) not in versions]
    if absent:
        raise ValueError(f"constraints.txt has no exact version of {', '.join(absent)}")
    return [f"{name}=={versions[_normal(name)]}" for name in names]


def command(into: Path, wanted: Sequence[str]) -> list[str]:
    """The call of pip that fetches wheels for the machine."""
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    kind = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    return [sys.executable, "-P", "-m", "pip", "download", "-q", *kind, *platforms, "-d", str(into), *wanted]


def travelling(into: Path) -> tuple[int, int]:
    """Bytes in files that git tracks or does not ignore, and in the wheels."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = {ROOT / name for name in names if name}
    wheels = set(into.glob("*.whl"))
    return _bytes(paths - wheels), _bytes(wheels)


def _bytes(paths: set[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Read the command line; return 1 if pip fails or too much would travel."""
    parser = argparse.ArgumentParser(prog="tools.gpu_check.carry", description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder of the wheels; emptied of older ones")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    for old in options.into.glob("*.whl"):
        old.unlink()
    wanted = pins(WHEELS, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    fetched = subprocess.run(command(options.into, wanted), check=False)
    if fetched.returncode:
        return fetched.returncode
    repository, wheels = (nbytes / (1 << 20) for nbytes in travelling(options.into.resolve()))
    fits = repository + wheels <= LIMIT_MIB
    print(f"repository {repository:.1f} MiB + {len(wanted)} wheels {wheels:.1f} MiB, of {LIMIT_MIB} MiB")
    print(LINES.format(folder=options.into) if fits else "this is too much")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
