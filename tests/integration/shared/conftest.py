"""One default stack and a gateway for the tests of this folder; each leaves all services running."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.integration.conftest import small_plan
from tests.integration.stack import CheckedStack

MODEL = "tiny-llama"
TURNS: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the tide of a moon pool " * 8}]


@pytest.fixture(scope="package")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    with CheckedStack(small_plan(checkpoint, tmp_path_factory.mktemp("stack"))) as running:
        yield running


@pytest.fixture(scope="package")
def address(stack: CheckedStack) -> str:
    """Of a gateway, which stops with the stack."""
    flags = ["--id", "gateway-0", "--listen", "127.0.0.1:0", "--set", "drain_s=5"]
    flags += ["--conductor", stack.address, "--model", stack.plan.model]
    return stack.spawn("gateway", "gateway-0", flags).wait_ready(180)


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def aio(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as client:
        yield client
