"""Slurm's job, Ray's actors and systemd's units start services with settings that exist, and end by drains."""

import configparser
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonpool.base.config import config_class, parse_address
from moonpool.base.rpc.process import EXIT_CONFIG, EXIT_MISMATCH
from moonpool.engine.config import EngineConfig
from moonpool.engine.remote.config import StageConfig
from moonpool.engine.remote.group_place import DEFAULT_PORT
from tests.unit.deploy.compose import ROOT

SRUN = """#!/bin/bash
# Notes the step, and runs until scancel signals the step. A signal to srun itself kills the step, as Slurm's does.
# The first prefill fails once, as a leader that loses its stage; the kvstore refuses its settings.
trap 'echo killed >>"$NOTES"; exit 1' TERM
trap 'echo ended >>"$NOTES"; exit 0' USR2
echo $$ >>"$NOTES.pids"
printf '%q ' "$@" >"$NOTES.$$"; echo >>"$NOTES.$$"; cat "$NOTES.$$" >>"$NOTES"
[[ $* == *" kvstore "* ]] && exit 2
[[ $* == *n2*" prefill "* ]] && mkdir "$NOTES.failed" 2>/dev/null && exit 1
while :; do sleep 0.05; done
"""
SCANCEL = """#!/bin/sh
[ "$*" = "--signal=TERM 7" ] && kill -USR2 $(cat "$NOTES.pids") 2>/dev/null
true
"""
RAY = """
def remote(**options):
    return Wrapped
class Wrapped:
    def __init__(self, cls): self.cls = cls
    def options(self, **options): return self
    def remote(self, *args): return Handle(self.cls(*args))
class Handle:
    def __init__(self, made): self.made = made
    def __getattr__(self, name): return Method(getattr(self.made, name))
class Method:
    def __init__(self, call): self.remote = call
class get_runtime_context:
    def get_node_id(self): return "here"
get = lambda found: found
init = lambda **options: None
"""
MOONPOOL = """#!/bin/bash
trap 'echo ended >>"$NOTES"; exit 0' TERM
printf '%q ' moonpool "$@" >"$NOTES.$$"; echo >>"$NOTES.$$"; cat "$NOTES.$$" >>"$NOTES"
echo "starting: what takes a while"; echo "ready: 10.0.0.1:50051"
while :; do sleep 0.05; done
"""
LIMIT_S = 30.0


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def noted(notes: Path, count: int, word: str = "") -> list[str]:
    """The lines that steps have noted, once there are so many."""
    end = time.monotonic() + LIMIT_S
    while True:
        lines = [line for line in (notes.read_text().splitlines() if notes.exists() else ()) if word in line]
        if len(lines) >= count:
            return lines
        assert time.monotonic() < end, lines
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("nodes", "stages", "engines"),
    [
        (4, 1, {("n2", "prefill"), ("n3", "decode"), ("n4", "prefill")}),
        (6, 2, {("n2", "prefill"), ("n3", "stage"), ("n4", "decode"), ("n5", "stage")}),  # a node is left over
    ],
)
def test_a_job_of_slurm_starts_services_again_when_they_fail_and_hands_its_end_on(
    tmp_path: Path, nodes: int, stages: int, engines: set[tuple[str, str]]
) -> None:
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "scancel", SCANCEL)
    program(
        tmp_path,
        "scontrol",
        "#!/bin/sh\nprintf '%s\\n' " + " ".join(f"n{number + 1}" for number in range(nodes)) + "\n",
    )
    notes = tmp_path / "notes"
    own = {"MODEL": "/models/m", "SLURM_JOB_NODELIST": f"n[1-{nodes}]", "SLURM_JOB_ID": "7", "NOTES": str(notes)}
    own["STAGES"] = str(stages)
    environment = {**os.environ, **own, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ROOT / "deploy/slurm/moonpool.sbatch"
    with subprocess.Popen(["bash", str(script)], env=environment, cwd=tmp_path) as job:
        try:
            steps = [shlex.split(line) for line in noted(notes, 4 + len(engines), "moonpool")]
            job.send_signal(signal.SIGUSR1)
            noted(notes, len(steps) - 2, "ended")
            assert job.wait(LIMIT_S) == 0, "the job waits until all steps have drained"
        finally:
            job.kill()
    assert len(noted(notes, 0, "moonpool")) == 4 + len(engines), "one step has started again, and once"
    found = {}
    for step in steps:
        node = next(word for word in step if word.startswith("--nodelist=")).removeprefix("--nodelist=")
        service, *flags = step[step.index("moonpool") + 1 :]
        config = config_class(service).load(flags)
        found[node, service] = config
        if isinstance(config, StageConfig):
            leader, port = parse_address(config.leader)
            assert (leader, port, config.node_rank) == (f"n{int(node[1:]) - 1}", DEFAULT_PORT, 1)
        else:
            assert service == "conductor" or list(config.model_dump()["conductor"]) == ["n1:50051"]
        if isinstance(config, EngineConfig):
            assert (config.nnodes, config.pipeline_parallel_size) == (stages, stages)
            assert config.stages_listen == ("" if stages == 1 else f"0.0.0.0:{DEFAULT_PORT}")
    assert set(found) == engines | {("n1", service) for service in ("conductor", "gateway", "kvstore")}
    text = script.read_text()
    drain_s = int(text.partition("MOONPOOL_DRAIN_S=")[2].split()[0])
    assert int(text.partition("--signal=B:USR1@")[2].split()[0]) > drain_s, "Slurm's end comes behind the drain"


def test_actors_of_ray_start_services_and_drain_them(tmp_path: Path) -> None:
    program(tmp_path, "moonpool", MOONPOOL)
    (tmp_path / "ray/util").mkdir(parents=True)
    (tmp_path / "ray/__init__.py").write_text(RAY)
    (tmp_path / "ray/util/__init__.py").write_text("get_node_ip_address = lambda: '10.0.0.1'\n")
    (tmp_path / "ray/util/scheduling_strategies.py").write_text(
        "class NodeAffinitySchedulingStrategy:\n    def __init__(self, node, soft): pass\n"
    )
    notes = tmp_path / "notes"
    own = {"NOTES": str(notes), "PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ROOT / "deploy/ray/moonpool_on_ray.py"
    command = [sys.executable, str(script), "--model", "m", "--prefill", "2"]
    with subprocess.Popen(command, env=os.environ | own, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "ready: http://10.0.0.1:50051\n"
            steps = [shlex.split(line) for line in noted(notes, 6, "moonpool")]
            driver.send_signal(signal.SIGTERM)
            assert driver.stdout.readline() == "drained: [0, 0, 0, 0, 0, 0]\n"
            assert driver.wait(LIMIT_S) == 0
        finally:
            driver.kill()
    assert len(noted(notes, 6, "ended")) == 6
    services = [service for _, service, *_ in steps]
    assert sorted(services) == ["conductor", "decode", "gateway", "kvstore", "prefill", "prefill"]
    for _, service, *flags in steps:
        config = config_class(service).load(flags)
        assert service == "conductor" or list(config.model_dump()["conductor"]) == ["10.0.0.1:50051"]


@pytest.mark.parametrize(
    ("name", "service"), [("conductor", "conductor"), ("prefill-0", "prefill"), ("kvstore-12", "kvstore")]
)
def test_a_unit_of_systemd_runs_the_service_of_its_name(tmp_path: Path, name: str, service: str) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy/systemd/moonpool@.service")
    settings = unit["Service"]
    program(tmp_path, "moonpool", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    line = settings["ExecStart"].replace("%%", "\0").replace("%i", name).replace("\0", "%").replace("$$", "$")
    words = shlex.split(line.replace("/opt/moonpool/bin", str(tmp_path)))
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [service, "--config", f"/etc/moonpool/{name}.yaml"]
    assert settings["RestartPreventExitStatus"].split() == [str(EXIT_CONFIG), str(EXIT_MISMATCH)]
    variables = dict(item.split("=") for item in settings["Environment"].replace("%i", name).split())
    changed = {variable.removeprefix("MOONPOOL_").lower(): value for variable, value in variables.items()}
    flags = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    needed = {
        "prefill": ["--conductor", "a:1", "--model", "m"],
        "kvstore": ["--data-dir", "d"],
        "conductor": ["--model", "m"],
    }
    config = config_class(service).load([*needed[service], *flags])
    assert (config.id, config.log_json) == (name, True)
    assert int(settings["TimeoutStopSec"]) > config.drain_s
