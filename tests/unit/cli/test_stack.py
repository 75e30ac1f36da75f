"""The processes of a local stack."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli.stack import LocalStack, ServiceProcess, StackPlan, memory_share
from moonpool.engine.roles.process import DecodeProcessConfig, EngineProcessConfig, PrefillProcessConfig
from tests.unit.cli.fake_services import instead

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("logged_before", [False, True])
def test_a_service_is_in_our_session_and_in_a_group_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged_before: bool
) -> None:
    """So that cores are shared fairly between services, and Ctrl-C reaches none of them; nobody else reads the log."""
    (tmp_path / "fake_service.py").write_text("import os\nprint('ready:', os.getsid(0), os.getpgrp(), flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if logged_before:
        (tmp_path / "log").touch(0o644)
    service = ServiceProcess("kvstore", "fake-0", [], tmp_path / "log", launcher=instead("fake_service"))
    assert service.wait_ready(60) == f"{os.getsid(0)} {service.pid}"
    assert service.wait(60) == 0
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("kind", "keys"), [("gateway", "keys"), ("conductor", "")])
def test_api_keys_of_the_environment_are_the_gateways(
    kind: str, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conductor takes keys at a port of its own, and would refuse to start."""
    (tmp_path / "fake_service.py").write_text("import os\nprint('ready: x' + os.environ.get('MOONPOOL_API_KEYS', ''))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MOONPOOL_API_KEYS", "keys")
    monkeypatch.chdir(tmp_path)
    service = ServiceProcess(kind, "fake-0", [], tmp_path / "log", launcher=instead("fake_service"))
    assert service.wait_ready(60) == f"x{keys}"
    assert service.wait(60) == 0


class LateEvent(threading.Event):
    """An event that is set just after a wait for the event has ended in vain."""

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(60)
        return False


def test_a_service_that_is_ready_just_after_a_wait_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake_service.py").write_text("import signal\nprint('ready: there', flush=True)\nsignal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Event", LateEvent)
        service = ServiceProcess("kvstore", "fake-0", [], tmp_path / "log", launcher=instead("fake_service"))
    try:
        assert service.wait_ready(60) == "there"
    finally:
        service.signal(signal.SIGKILL)
        service.wait(60)


_WAITS = """
import asyncio, os
while os.getppid() == int(os.environ["OWN_PARENT"]):
    os.sched_yield()
from moonpool.base.rpc.process import DIE_WITH_PARENT, parent_watch
async def main():
    stopping = asyncio.Event()
    with parent_watch(stopping, os.environ[DIE_WITH_PARENT]):
        await stopping.wait()
asyncio.run(main())
"""
_STARTS = """
import os, pathlib, sys
from moonpool.cli.stack import ServiceProcess
from tests.unit.cli.fake_services import instead
os.environ["OWN_PARENT"] = str(os.getpid())
launcher = instead("fake_service")
print(ServiceProcess("kvstore", "fake-0", [], pathlib.Path(sys.argv[1]), launcher=launcher).pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_a_service_ends_whose_parent_ended_while_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_service.py").write_text(_WAITS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", _STARTS, str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        service = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.stdin.close()
            ended, _, _ = select.select([service], [], [], 60)
            assert ended, "the service outlives its parent"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(service, signal.SIGKILL)
            os.close(service)


GPU = ["--device", "cuda:0"]
TLS = [part for name in ("cert", "key", "ca") for part in ("--set", f"tls_{name}={name}.pem")]
PROCESSES: dict[str, type[EngineProcessConfig]] = {"prefill": PrefillProcessConfig, "decode": DecodeProcessConfig}


@pytest.mark.parametrize(
    ("counts", "extra", "shares"),
    [
        ((1, 1), {"prefill": GPU, "decode": ["--set", "device=cuda"]}, (0.45, 0.45)),
        ((2, 1), {"prefill": GPU, "decode": GPU}, (0.3, 0.3)),
        ((1, 1), {"prefill": GPU, "decode": [*GPU, "--set", "device=cuda:1"]}, (0.9, 0.9)),
        ((1, 1), {"prefill": GPU, "decode": [*GPU, "--set", "gpu_memory_utilization=0.2"]}, (0.45, None)),
    ],
)
def test_engines_on_one_gpu_share_it(
    tmp_path: Path, counts: tuple[int, int], extra: dict[str, list[str]], shares: tuple[float | None, ...]
) -> None:
    plan = StackPlan(model="m", data_dir=tmp_path, prefill=counts[0], decode=counts[1], extra=extra)
    assert tuple(memory_share(plan, kind) for kind in ("prefill", "decode")) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("plan", "either"),
    [
        ({}, (False, False)),
        ({"decode": 2}, (True, True)),
        ({"prefill": 2, "pipeline_parallel_size": 2}, (False, False)),
        ({"prefill": 2, "extra": {"prefill": ["--set", "pipeline_parallel_size=2"]}}, (False, False)),
        ({"prefill": 2, "extra": {"decode": ["--set", "either_role=false"]}}, (True, False)),
        ({"prefill": 2, "extra": {"prefill": TLS, "decode": [*TLS, "--set", "either_role=true"]}}, (False, True)),
        ({"decode": 2, "extra": {"decode": ["--set", "computes_prompts=true"]}}, (False, False)),
        ({"extra": {"prefill": ["--set", "either_role=true"]}}, (True, False)),
    ],
)
def test_engines_may_change_roles_where_one_may_leave_its_pool(
    tmp_path: Path, plan: dict[str, Any], either: tuple[bool, bool]
) -> None:
    """Not the last one of a kind, nor with pipeline stages, a certificate of one role, or both roles at once."""
    stack = LocalStack(StackPlan(model="m", data_dir=tmp_path, **plan))
    stack.addresses = ["127.0.0.1:1"]
    loaded = [PROCESSES[kind].load(stack.member_arguments(kind, f"{kind}-0")) for kind in ("prefill", "decode")]
    assert tuple(config.either_role for config in loaded) == either


def test_an_engine_that_may_change_knows_the_settings_of_both_roles(tmp_path: Path) -> None:
    """What both roles have is the engine's own: another pool or device is no part of a role."""
    extra = {
        "prefill": ["--max-num-batched-tokens", "64", "--set", "max_queue=9", "--set", "blocks=7"],
        "decode": ["--max-num-seqs", "5", "--set", "blocks=8", "--set", "grace_s=3"],
    }
    stack = LocalStack(StackPlan(model="m", data_dir=tmp_path, prefill=2, extra=extra))
    stack.addresses = ["127.0.0.1:1"]
    for kind, blocks in (("prefill", 7), ("decode", 8)):
        config = PROCESSES[kind].load(stack.member_arguments(kind, f"{kind}-0"))
        assert (config.max_queue, config.max_num_batched_tokens) == (9, 64)
        assert (config.max_num_seqs, config.grace_s, config.blocks) == (5, 3.0, blocks)


def test_stages_of_a_pipeline_count_with_the_devices_that_they_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"prefill": GPU, "decode": ["--device", "cuda:1"]}
    plan = StackPlan(model="m", data_dir=tmp_path, pipeline_parallel_size=2, extra=extra)
    assert memory_share(plan, "decode") == pytest.approx(0.45)
    monkeypatch.setenv("MOONPOOL_GPU_MEMORY_UTILIZATION", "0.1")
    assert memory_share(plan, "decode") is None
