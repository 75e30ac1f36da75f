"""Stacks on the real Slurm and the real Ray, as deploy/slurm and deploy/ray start them: their ends cut no answer off.

Slurm: Debian's packages `slurmctld`, `slurmd` and `munge`, as root; three nodes of this machine, named by loopback
addresses. Ray: `python -m venv .engines/ray && .engines/ray/bin/pip install ray==2.60.0`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx2
import pytest

from moonpool.base.bundled import model_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
RAY = ROOT / ".engines/ray/bin/python"
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
TOKENS = 400
START_S, END_S = 480.0, 420.0
LIMIT_MINUTES = 7
"""Of the job. Slurm signals 150 s before its end, or up to 60 s earlier."""
STARTED_ON_RAY = """
import runpy, sys, ray
init = ray.init
ray.init = lambda **options: init(num_cpus=16, include_dashboard=False, object_store_memory=100 << 20, **options)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def environment(folder: Path) -> dict[str, str]:
    """Variables with which `moonpool` is this checkout's."""
    program = folder / "bin/moonpool"
    program.parent.mkdir()
    start = "from moonpool.cli.entry import main; main()"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -c "{start}" "$@"\n')
    program.chmod(0o755)
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**known, "PATH": f"{program.parent}:{os.environ['PATH']}"}


def ready(url: str, alive: Callable[[], bool]) -> None:
    """Wait until the gateway has engines."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert alive(), "the stack has ended"
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", timeout=10).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError("no engine has joined")


def stream(client: httpx2.Client, began: list[float]) -> int:
    """The tokens of an answer; notes when the first one came."""
    body = {
        "model": "tiny", "prompt": "the tide", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage: dict[str, int] = {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise httpx2.ConnectError(f"refused with {response.status_code}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                began += [] if piece.get("usage") or len(began) > len(usage) else [time.monotonic()]
                usage = piece.get("usage") or usage
    return usage["completion_tokens"]


def streams_until_refused(url: str) -> int:
    """Stream answers one after the other until no further one is taken; each that began must be whole."""
    count, end = 0, time.monotonic() + END_S
    with httpx2.Client(base_url=url, timeout=120.0) as client:
        while time.monotonic() < end:
            began: list[float] = []
            try:
                assert stream(client, began) == TOKENS
            except httpx2.HTTPError:
                assert not began, "an answer was cut off"
                return count
            count += 1
    raise AssertionError("the stack did not end")


@contextlib.contextmanager
def running(command: list[str], log: Path, variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """A daemon in the foreground until the body ends."""
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=variables) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


def slurm_conf(folder: Path, socket_path: Path) -> str:
    """Slurm with three nodes on this machine, all files below a folder."""
    host, ctld = socket.gethostname().split(".")[0], free_port()
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={free_port()} CPUs=8 State=UNKNOWN" for name in NODES
    ]
    lines = [
        "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
        "AuthType=auth/munge", f"AuthInfo=socket={socket_path}", "CredType=cred/munge",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool-%n", f"SlurmctldPidFile={folder}/ctld.pid",
        f"SlurmdPidFile={folder}/%n.pid", f"SlurmctldPort={ctld}", "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none", "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "ReturnToService=2",
        "KillWait=60", "MailProg=/bin/true", "SlurmdParameters=config_overrides", *nodes,
        f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def slurm(folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """A Slurm of its own; sets SLURM_CONF in the variables."""
    (folder / "state").mkdir(parents=True)
    key, socket_path = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(slurm_conf(folder, socket_path))
    variables["SLURM_CONF"] = str(folder / "slurm.conf")
    munged = [
        *("munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}"),
        *(f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(munged, folder / "munged.out"))
        stack.enter_context(running(["slurmctld", "-D", "-i"], folder / "ctld.log", variables))
        for name in NODES:
            stack.enter_context(running(["slurmd", "-D", "-N", name], folder / f"{name}.log", variables))
        yield


def told(command: list[str], variables: Mapping[str, str]) -> str:
    """What a program of Slurm says; asked again while Slurm starts."""
    for _ in range(60):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        time.sleep(1.0)
    raise AssertionError(f"{command}: {done.stderr}")


@pytest.mark.skipif(
    not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))) or os.geteuid() != 0,
    reason="Slurm and munge are not installed, or this is not root",
)
def test_the_end_of_a_slurm_job_cuts_no_answer_off(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    http = free_port()
    variables |= {"MODEL": str(model_dir()), "HTTP_PORT": str(http), "CONDUCTOR_PORT": str(free_port())}
    with slurm(tmp_path / "slurm", variables):
        command = [
            *("sbatch", "--parsable", f"--time={LIMIT_MINUTES}", f"--chdir={tmp_path}", f"--output={tmp_path}/job.log"),
            str(ROOT / "deploy/slurm/moonpool.sbatch"),
        ]
        job = told(command, variables).strip()

        def running_still() -> bool:
            return bool(re.search(r"JobState=(RUNNING|PENDING|CONFIGURING)", told(show, variables)))

        show = ["scontrol", "show", "job", job]
        try:
            ready(f"http://{NODES[0]}:{http}", running_still)
            log = tmp_path / f"moonpool-{job}-prefill-{NODES[1]}.log"
            steps = told(["squeue", "--steps", "--noheader", "--format=%i %N", f"--job={job}"], variables)
            [killed] = [step for step, node in map(str.split, steps.splitlines()) if node == NODES[1]]
            told(["scancel", "--signal=KILL", killed], variables)
            while log.read_text().count('{"event": "ready"') < 2:
                assert running_still(), "a step that was killed has not started again"
                time.sleep(0.5)
            ready(f"http://{NODES[0]}:{http}", running_still)
            assert streams_until_refused(f"http://{NODES[0]}:{http}") > 0
            end = time.monotonic() + START_S
            while running_still():
                assert time.monotonic() < end, told(show, variables)
                time.sleep(1.0)
            shown = told(show, variables)
        finally:
            subprocess.run(["scancel", job], env=variables, check=False)
    found = dict(re.findall(r"(\w+)=(\S+)", shown))
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), shown
    minutes, seconds = map(int, found["RunTime"].split(":")[1:])
    assert 60 * minutes + seconds < 60 * LIMIT_MINUTES, "Slurm's own end had to kill"


@pytest.mark.skipif(not RAY.exists(), reason="Ray is not installed in .engines/ray")
def test_the_end_of_a_driver_on_ray_cuts_no_answer_off(tmp_path: Path) -> None:
    variables = environment(tmp_path) | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": f"/tmp/ray-{os.getpid()}"}
    http = free_port()
    command = [
        *(
            str(RAY),
            "-u",
            "-c",
            STARTED_ON_RAY,
            str(ROOT / "deploy/ray/moonpool_on_ray.py"),
            "--model",
            str(model_dir()),
        ),
        *("--data-dir", str(tmp_path / "data"), "--port", str(free_port()), "--http-port", str(http)),
    ]
    log = tmp_path / "driver.log"
    with log.open("w") as out, subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=out, stderr=out) as driver:
        try:
            ready(f"http://127.0.0.1:{http}", lambda: driver.poll() is None)
            began: list[float] = []
            with httpx2.Client(base_url=f"http://127.0.0.1:{http}", timeout=120.0) as client:
                assert stream(client, began) == TOKENS
            driver.send_signal(signal.SIGTERM)
            streams_until_refused(f"http://127.0.0.1:{http}")
            assert driver.wait(END_S) == 0, log.read_text()
        finally:
            driver.kill()
            driver.wait()
            shutil.rmtree(variables["RAY_TMPDIR"], ignore_errors=True)
    assert "drained: [0, 0, 0, 0, 0]" in log.read_text()
