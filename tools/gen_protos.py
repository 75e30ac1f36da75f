#!/usr/bin/env python3
"""Regenerate moonpool/v1 from protos/, and on a release write down the contracts as they are.

    python tools/gen_protos.py             regenerate moonpool/v1
    python tools/gen_protos.py --out DIR   generate below DIR instead (the drift test does)
    python tools/gen_protos.py --release   also write protos/released.binpb, with which later contracts stay compatible

Same protos and same generators give the same bytes, so the generators are pinned here.
"""

import argparse
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
PACKAGE = Path("moonpool/v1")
RELEASED = PROTOS / "released.binpb"
GENERATORS = {"grpcio-tools": "1.85.1", "mypy-protobuf": "5.1.0"}
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def check_generators() -> None:
    """Refuse other generator versions: their output would differ needlessly."""
    for name, wanted in GENERATORS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise SystemExit(f"{name} {wanted} is needed, {found} is installed: pip install {name}=={wanted}")


def protoc(*options: str) -> None:
    """Run the protocol compiler over all contracts."""
    files = sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).glob("*.proto"))
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", "-I", str(PROTOS), *plugins, *options, *files]
    done = subprocess.run(command, cwd=PROTOS, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def generate(out: Path) -> None:
    """Write the generated modules to `out`/moonpool/v1, and remove modules without a contract."""
    folder = out / PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    before = [path for pattern in PATTERNS for path in folder.glob(pattern)]
    protoc(f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out={out}", f"--mypy_grpc_out={out}")
    stems = {path.stem for path in (PROTOS / PACKAGE).glob("*.proto")}
    for path in before:
        if path.name.split("_pb2")[0] not in stems:
            path.unlink()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="where moonpool/v1 is written; default: the repository")
    parser.add_argument("--release", action="store_true", help="also write protos/released.binpb")
    options = parser.parse_args()
    check_generators()
    generate(options.out.resolve())
    if options.release:
        protoc(f"--descriptor_set_out={RELEASED}", "--include_imports")


if __name__ == "__main__":
    main()
