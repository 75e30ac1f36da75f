"""Other engines for CPUs, each in a process of its own, from an environment that is set up once."""

import contextlib
import json
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.frame import Skipped

WORKER = Path(__file__).with_name("engine_worker.py")
PACKAGES = {"openvino": ("openvino-genai==2026.4.1.0",), "llama_cpp": ("llama-cpp-python==0.3.36", "numpy==2.4.6")}
"""That each needs; the last one is compiled for this machine, which takes minutes. transformers is ours."""
NAMES = {
    "openvino": "OpenVINO GenAI",
    "llama_cpp": "llama.cpp",
    "vllm": "vLLM",
    "transformers": "transformers",
    "sglang": "SGLang",
}
ON_GPUS = ("vllm", "transformers", "sglang")
INSTALLED = {"vllm": Path(".engines/vllm/bin/python")}
"""The Python of peers that `make test-engines` installs, at exact versions."""
START_S = 900.0
"""That one may take to load a model; vLLM compiles it, too."""


class Environment:
    """A folder with a virtual environment per peer, so that none changes what another one needs.

    Args:
        folder: of all of them.
        progress: told of each step.
        packages: that each peer needs.
        installed: the Python of peers that are installed elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        progress: Callable[[str], None],
        packages: Mapping[str, Sequence[str]] = PACKAGES,
        installed: Mapping[str, Path] = INSTALLED,
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._packages = packages
        self._installed = installed

    def python(self, peer: str) -> Path:
        """The Python that runs a peer; sets its environment up when there is none yet.

        Raises:
            Skipped: it cannot be installed here, or imported by this Python if nothing installs it.
        """
        if (elsewhere := self._installed.get(peer)) is not None:
            if not elsewhere.exists():
                raise Skipped(f"{elsewhere} is not there: `make test-engines` installs it")
            return elsewhere
        packages = self._packages.get(peer)
        if packages is None:
            if find_spec(peer) is None:
                raise Skipped(f"{NAMES[peer]} cannot be imported")
            return Path(sys.executable)
        home = self._folder / peer
        python, done = home / "bin" / "python", home / "done"
        if not done.exists() or done.read_text() != " ".join(packages):
            self._progress(f"installing {' '.join(packages)} into {home}, once")
            venv.create(home, clear=True, with_pip=True)
            ended = subprocess.run(
                [python, "-P", "-m", "pip", "install", "-q", *packages], capture_output=True, text=True, check=False
            )
            if ended.returncode:
                raise Skipped(f"{packages[0]} cannot be installed: {ended.stderr.strip().splitlines()[-1:]}")
            done.write_text(" ".join(packages))
        return python


class Peer:
    """One engine with one model loaded.

    Attributes:
        name: as it is shown.
        version: its package's.
    """

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self.name = NAMES[name]
        self._process = process
        late = threading.Timer(START_S, process.kill)
        late.start()
        try:
            self.version = self._read()["ready"]
        finally:
            late.cancel()

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds of greedy answers of so many tokens to prompts of one length, computed together; and the answers.

        Raises:
            Skipped: the process has ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading tells
            self._process.stdin.write(
                json.dumps({"prompts": [list(prompt) for prompt in prompts], "tokens": tokens}) + "\n"
            )
            self._process.stdin.flush()
        said = self._read()
        return said["seconds"], said["token_ids"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # others are its libraries' messages
                said: dict[str, Any] = json.loads(line)
                return said
        raise Skipped(f"{self.name} ended with {self._process.wait()}")


@contextlib.contextmanager
def running(
    peer: str,
    python: Path,
    model: Path,
    threads: int,
    dtype: str = "bfloat16",
    device: str = "cpu",
    log: int = subprocess.DEVNULL,
) -> Iterator[Peer]:
    """A peer for as long as the body runs; the file `log` gets its messages.

    `dtype` and `device` count for those that take one.

    Raises:
        Skipped: it cannot load the model, or does not run on the device.
    """
    if device != "cpu" and peer not in ON_GPUS:
        raise Skipped(f"{NAMES[peer]} is compared on CPUs only")
    argv = [str(python), str(WORKER), peer, str(model), str(threads), dtype, device]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield Peer(peer, process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # a question may wait there
                if pipe is not None:
                    pipe.close()
