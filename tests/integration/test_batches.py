"""A batch outlives `kill -9` of gateway and conductor: each line is answered once, and by the right tokens."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import httpx2

from moonpool.base.bundled import model_dir
from moonpool.cli.stack import GATEWAY_ID
from tests.integration.conftest import small_plan
from tests.integration.stack import CheckedStack

ENDPOINT = "/v1/completions"
LINES = 60
WAIT_S = 120.0
BODY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def prompt(number: int) -> str:
    return f"{'a shared beginning of many words ' * 6} and question {number % 20} of {number}"


def wait(http: httpx2.Client, batch: str, *, answered: int = 0) -> dict[str, Any]:
    """The batch once it is over, or has so many answers."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            told: dict[str, Any] = http.get(f"/v1/batches/{batch}").raise_for_status().json()
        except httpx2.HTTPError:
            told = {"status": "unknown", "request_counts": {"completed": 0}}
        over = told["status"] in ("completed", "failed", "expired", "cancelled")
        if over or (answered and told["request_counts"]["completed"] >= answered):
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def test_a_batch_goes_on_after_its_gateway_and_conductor_were_killed(tmp_path: Path) -> None:
    plan = dataclasses.replace(small_plan(model_dir(), tmp_path), http_port=0)
    with CheckedStack(plan) as stack, httpx2.Client(base_url=f"http://{stack.http_address}", timeout=30) as http:
        made = [
            {"custom_id": f"{each}", "method": "POST", "url": ENDPOINT, "body": {**BODY, "prompt": prompt(each)}}
            for each in range(LINES)
        ]
        content = "".join(json.dumps(each) + "\n" for each in made).encode()
        files = {"file": ("in.jsonl", content)}
        file = http.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()["id"]
        asked = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).raise_for_status().json()["id"]
        wait(http, batch, answered=3)
        for service in (GATEWAY_ID, "conductor"):
            stack.restart(service, kill=True)
        told = wait(http, batch)
        assert told["status"] == "completed"
        assert told["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        text = http.get(f"/v1/files/{told['output_file_id']}/content").raise_for_status().text
        answers = [json.loads(each) for each in text.splitlines()]
        assert [each["custom_id"] for each in answers] == [each["custom_id"] for each in made]
        for number in (0, LINES // 2, LINES - 1):
            alone = http.post(ENDPOINT, json={**BODY, "prompt": prompt(number)}).raise_for_status().json()
            answer = answers[number]["response"]["body"]
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
