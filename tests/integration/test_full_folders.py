"""Stacks on a full disk, and services whose logs nobody can keep: answers come, losses are told, and room heals all.

Skipped where mounting is not permitted.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.fork_server import start_service
from moonpool.cli.stack import GATEWAY_ID, ServiceProcess, StackPlan
from tests.integration.disks import Disk
from tests.integration.stack import CheckedStack

READY_S = 60.0
ASK_S = 30.0
FULL_DISK_BYTES = 48 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """An empty tmpfs."""
    disk = Disk(tmp_path / "disk")
    try:
        disk.mount(disk.path, "-t", "tmpfs", "-o", f"size={FULL_DISK_BYTES}", "tmpfs")
        yield disk
    finally:
        disk.close()


@pytest.mark.slow
def test_a_stack_whose_data_folder_is_full_answers_and_heals(disk: Disk) -> None:
    """Logs, blocks, stored responses, files and batches lie on the disk."""
    batches = disk.path / "batches"
    stored = ["--set", f"response_store_file={disk.path / 'responses.db'}", "--set", f"batch_dir={batches}"]
    plan = StackPlan(
        str(model_dir()), disk.path, http_port=0, ssd_bytes=FULL_DISK_BYTES, log_level="debug",
        extra={"gateway": stored, "kvstore": ["--set", "segment_bytes=1MiB"]},
    )  # fmt: skip
    with CheckedStack(plan) as stack, httpx2.Client(base_url=f"http://{stack.http_address}", timeout=ASK_S) as http:

        def asked(text: str, **fields: object) -> httpx2.Response:
            body = {"model": "any", "input": text, "max_output_tokens": 8, **fields}
            return http.post("/v1/responses", json=body)

        def file() -> httpx2.Response:
            lines = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n' * 400
            return http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", lines)})

        first = asked("Say it.", store=True)
        assert first.status_code == 200, first.text
        assert file().status_code == 200
        disk.fill()
        text = "A long prompt that is worth a block or more. " * 40
        for number in range(5):
            answered = asked(f"{number} {text}", store=False)
            assert answered.status_code == 200, answered.text
        kept, refused = asked("Keep it.", store=True), file()
        assert (kept.status_code, refused.status_code) == (503, 503), (kept.text, refused.text)
        assert http.get(f"/v1/responses/{first.json()['id']}").status_code == 200
        assert all(service.returncode is None for service in stack.services.values())
        (disk.path / "another").unlink()
        healed = asked("Keep it.", store=True)
        assert healed.status_code == 200, healed.text
        assert file().status_code == 200
        assert asked("Go on.", store=True, previous_response_id=healed.json()["id"]).status_code == 200
        for name in (GATEWAY_ID, "kvstore-0"):
            assert "Traceback" not in (disk.path / "logs" / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("kind", "flags"), [("kvstore", ["--data-dir", "data"]), ("conductor", ["--model", str(model_dir())])]
)
def test_a_service_whose_log_cannot_be_written_serves_and_ends_well(
    kind: str, flags: list[str], tmp_path: Path
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    flags = [str(tmp_path / flag) if flag == "data" else flag for flag in flags]
    arguments = ["--id", f"{kind}-0", "--listen", "127.0.0.1:0", "--log-level", "debug", *flags]
    service = ServiceProcess(kind, f"{kind}-0", arguments, full, launcher=start_service)
    try:
        service.wait_ready(READY_S)
        service.signal(signal.SIGTERM)
        assert service.wait(READY_S) == 0
    finally:
        service.signal(signal.SIGKILL)
