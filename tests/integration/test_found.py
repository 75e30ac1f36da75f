"""Each of 100 refused and 100 bad requests is found by the id that its client gave."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, Explanation
from tests.integration.conftest import with_flags
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow
EACH = 100
REFUSED = {"prompt": "the tide of a moon pool turns", "max_tokens": 4, "slo": {"ttft_s": 1e-9}}
BAD: list[dict[str, Any]] = [
    {"prompt": 7.5}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "model": "nobody's"}, {"max_tokens": 4},
]  # fmt: skip


async def ask(address: str) -> dict[str, int]:
    """The status of each request, by its id."""
    async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=60.0) as http:

        async def one(name: str, body: dict[str, Any]) -> tuple[str, int]:
            answer = await http.post("/v1/completions", json=body, headers={"x-request-id": name})
            assert answer.headers["x-request-id"] == name
            return name, answer.status_code

        asked = [(f"refused-{number}", {**REFUSED, "stream": bool(number % 2)}) for number in range(EACH)]
        asked += [(f"bad-{number}", BAD[number % len(BAD)]) for number in range(EACH)]
        return dict(await asyncio.gather(*(one(name, body) for name, body in asked)))


async def explained(address: str) -> list[Explanation]:
    """What the conductor says about the refused requests."""
    async with AsyncClient(address) as client:
        return [await client.explain(f"refused-{number}") for number in range(EACH)]


def test_each_refused_and_each_bad_request_is_found_by_its_id(plan: StackPlan) -> None:
    with CheckedStack(with_flags(replace(plan, http_port=0), "gateway", "--set", "log_json=true")) as stack:
        statuses = asyncio.run(ask(stack.http_address))
        explanations = asyncio.run(explained(stack.address))
        log = stack.services["gateway-0"].log_path
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert {name: status for name, status in statuses.items() if name.startswith("refused")} == {
        f"refused-{number}": 429 for number in range(EACH)
    }
    assert {status for name, status in statuses.items() if name.startswith("bad")} == {400, 404}
    assert all(explanation.refused for explanation in explanations), "each is explained"
    found = {line["request"]: line for line in lines if "request" in line}
    assert {name: found[name]["status"] for name in statuses} == statuses
    for name in statuses:
        assert found[name]["code" if name.startswith("refused") else "parameter"], found[name]
