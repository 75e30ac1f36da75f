"""LoRA adapters through all services: two of them and none at once, cached, moved, preempted, from the store.

Answers are those of PEFT's own models, token for token.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import pytest

from moonpool.base.checkpoint import load_config
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient, Client, GenerateResult, InvalidRequest, NotFound
from moonpool.engine.models.random_checkpoint import create_lora
from tests.integration.conftest import BLOCK, small_plan, tokens, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by PEFT
ANSWER = 2 * BLOCK + 5
NAMES = ("", "sql", "chat")
HOW = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Served:
    """A running stack with two adapters, whose decode instance preempts often, and each adapter's reference."""

    stack: CheckedStack
    client: Client
    references: Mapping[str, Reference]
    folder: Path

    def ask_at_once(self, prompt: Sequence[int], names: Sequence[str] = NAMES) -> dict[str, GenerateResult]:
        """One prompt's answers with each of these adapters, asked for together."""

        async def ask() -> list[GenerateResult]:
            async with AsyncClient(self.stack.address) as client:
                asked = (client.generate(token_ids=prompt, sampling=HOW, model=name) for name in names)
                return await asyncio.gather(*asked)

        return dict(zip(names, asyncio.run(ask()), strict=True))

    def check(self, prompt: Sequence[int], found: Mapping[str, GenerateResult]) -> None:
        for name, result in found.items():
            assert len(result.token_ids) == ANSWER
            self.references[name].assert_greedy(prompt, result.token_ids)
        assert len({tuple(result.token_ids) for result in found.values()}) == len(found)


def reference(checkpoint: Path, folder: Path) -> Reference:
    import peft  # takes seconds, and only one of several processes runs these tests

    found = Reference(checkpoint)
    found.model = peft.PeftModel.from_pretrained(found.model, folder)  # type: ignore[assignment]  # called alike
    return found


STACKS = [
    *(pytest.param((1, device), id=f"stages1, {device}", marks=pytest.mark.slow) for device in ("cpu", "staged:7")),
    pytest.param((2, "cpu"), id="stages2"),
]


@pytest.fixture(scope="module", params=STACKS)
def served(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, config = tmp_path_factory.mktemp("loras"), load_config(checkpoint)
    create_lora(folder / "sql", config, 1)
    create_lora(folder / "chat", config, 2, ("k", "v", "gate", "output"), rank=4)
    stages, device = request.param
    plan = replace(small_plan(checkpoint, tmp_path_factory.mktemp("stack")), pipeline_parallel_size=stages, http_port=0)
    modules = ",".join(f"{name}={folder / name}" for name in NAMES[1:])
    plan = with_flags(plan, "conductor", "--lora-modules", modules, "--set", f"lora_folder={folder}")
    for kind in ("prefill", "decode"):
        plan = with_flags(plan, kind, "--max-loras", "3", "--device", device)
    plan = with_flags(plan, "decode", "--set", "preempt_every=9", "--set", "preemption=swap")
    references = {"": Reference(checkpoint)} | {name: reference(checkpoint, folder / name) for name in NAMES[1:]}
    with CheckedStack(plan, invariants="decode") as stack, Client(stack.address) as client:
        yield Served(stack, client, references, folder)


@pytest.mark.parametrize("length", [3, 5 * BLOCK + 3])
def test_at_once_then_cached(served: Served, length: int) -> None:
    """The second time the prompt's full blocks are hit, each within its own adapter."""
    prompt = tokens(length, f"lora {length}")
    served.check(prompt, served.ask_at_once(prompt))
    again = served.ask_at_once(prompt)
    served.check(prompt, again)
    assert {result.usage.cached_tokens >= (length - 1) // BLOCK * BLOCK for result in again.values()} == {True}


def test_kv_of_adapters_is_never_mixed(served: Served) -> None:
    prompt = tokens(4 * BLOCK, "lora, mixed")
    for name in NAMES:
        result = served.client.generate(token_ids=prompt, sampling=HOW, model=name)
        assert result.usage.cached_tokens == 0
        served.references[name].assert_greedy(prompt, result.token_ids)


def test_from_the_store_after_a_restart(served: Served) -> None:
    """The new instance has loaded the adapters as it joined, or loads them with the requests."""
    prompt = tokens(6 * BLOCK, "lora, stored")
    served.ask_at_once(prompt)

    def stored(found: Mapping[str, GenerateResult]) -> bool:
        return all(result.usage.cached_tokens >= 5 * BLOCK for result in found.values())

    again = served.stack.ask_restarted(["prefill-0"], lambda: served.ask_at_once(prompt), stored)
    served.check(prompt, again)
    assert stored(again)
    assert served.stack.gauge("prefill-0", "loras") == 2


def test_loaded_and_unloaded_over_http(served: Served, checkpoint: Path) -> None:
    """A request that runs goes on; a changed adapter under the old name hits none of the old KV."""
    config, prompt = load_config(checkpoint), tokens(5 * BLOCK, "lora, run time")
    create_lora(served.folder / "new", config, 3)
    with httpx2.Client(base_url=f"http://{served.stack.http_address}", timeout=60) as http:

        def post(path: str, **body: object) -> httpx2.Response:
            return http.post(path, json=body)

        def ask() -> tuple[list[int], int]:
            answered = post(
                "/v1/completions", model="new", prompt=prompt, max_tokens=ANSWER, temperature=0, ignore_eos=True,
                return_token_ids=True,
            ).json()  # fmt: skip
            assert answered["model"] == "new"
            found = answered["choices"][0]["token_ids"]
            return found, answered["usage"]["prompt_tokens_details"]["cached_tokens"]

        def models() -> list[tuple[str, str | None]]:
            return [(card["id"], card.get("parent")) for card in http.get("/v1/models").json()["data"]]

        assert post("/v1/load_lora_adapter", lora_name="new", lora_path="new").status_code == 200
        assert ("new", "tiny-llama") in models()
        first, cached = ask()
        assert cached == 0
        reference(checkpoint, served.folder / "new").assert_greedy(prompt, first)
        assert ask() == (first, 5 * BLOCK - 1)
        events = iter(served.client.stream(token_ids=prompt, sampling=HOW, model="new"))
        begun = next(events).token_ids
        create_lora(served.folder / "new", config, 4)
        assert post("/v1/load_lora_adapter", lora_name="new", lora_path="new").status_code == 400
        answered = post("/v1/load_lora_adapter", lora_name="new", lora_path="new", load_inplace=True)
        assert answered.status_code == 200
        second, cached = ask()
        assert cached == 0
        reference(checkpoint, served.folder / "new").assert_greedy(prompt, second)
        rest = [token for event in events for token in event.token_ids]
        assert [*begun, *rest] == first
        assert post("/v1/unload_lora_adapter", lora_name="new").status_code == 200
        assert post("/v1/unload_lora_adapter", lora_name="new").status_code == 404
        assert "new" not in dict(models())
    with pytest.raises(InvalidRequest, match="not 'new'"):
        served.client.generate(token_ids=prompt, model="new")
    with pytest.raises(NotFound):
        served.client.unload_lora_adapter("new")


def test_what_cannot_be_computed_is_refused_as_it_is_loaded(served: Served, checkpoint: Path) -> None:
    config = load_config(checkpoint)
    create_lora(served.folder / "large", config, 5, rank=17)
    create_lora(served.folder / "dora", config, 5, settings={"use_dora": True})
    for path, words in (("large", "rank 17, the setting allows 16"), ("dora", "use_dora"), ("none", "no adapter_con")):
        with pytest.raises(InvalidRequest, match=words) as refused:
            served.client.load_lora_adapter("refused", path)
        assert refused.value.field == "lora_path"
    assert {lora.name for lora in served.client.cluster_state().loras} == set(NAMES[1:])
