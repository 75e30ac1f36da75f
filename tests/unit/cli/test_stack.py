"""The processes of a local stack."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moonpool.cli.stack import ServiceProcess, StackPlan, memory_share
from tests.unit.cli.fake_services import instead

ROOT = Path(__file__).parents[3]


def test_a_service_is_in_our_session_and_in_a_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that cores are shared fairly between services, and Ctrl-C reaches none of them."""
    (tmp_path / "fake_service.py").write_text("import os\nprint('ready:', os.getsid(0), os.getpgrp(), flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    service = ServiceProcess("kvstore", "fake-0", [], tmp_path / "log", launcher=instead("fake_service"))
    assert service.wait_ready(60) == f"{os.getsid(0)} {service.pid}"
    assert service.wait(60) == 0


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


def test_stages_of_a_pipeline_count_with_the_devices_that_they_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"prefill": GPU, "decode": ["--device", "cuda:1"]}
    plan = StackPlan(model="m", data_dir=tmp_path, pipeline_parallel_size=2, extra=extra)
    assert memory_share(plan, "decode") == pytest.approx(0.45)
    monkeypatch.setenv("MOONPOOL_GPU_MEMORY_UTILIZATION", "0.1")
    assert memory_share(plan, "decode") is None
