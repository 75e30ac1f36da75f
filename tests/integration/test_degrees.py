"""Every degree of prefill with every degree of decode, for each kind of layer and of numbers.

`test_parity` has chosen pairs with everything else that a request may meet.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.base.quantization import Quantization
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import LocalStack, ServiceProcess
from moonpool.client import Client
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import SEED, small_plan, tokens, with_flags
from tests.integration.reference import GAP_TOLERANCE, Reference, error_of
from tests.integration.stack import CheckedStack
from tests.integration.test_parity import TIMES_ERROR
from tests.integration.test_quantised import GAP as INT8_GAP
from tests.integration.test_quantised import torch_kernels
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.packed_reference import GAP as PACKED_GAP
from tests.unit.engine.models.packed_reference import pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS, STAGES = (1, 2, 4), (1, 2)
PREFILLS = list(itertools.product(RANKS, STAGES))
MODELS: dict[str, tuple[str, Quantization]] = {
    "dense": ("tiny-qwen3", "none"),
    "windowed": ("tiny-gemma3", "none"),
    "latent": ("tiny-deepseek-v3", "none"),
    "mixture": ("tiny-mixtral", "none"),
    "packed": ("tiny-llama", "int4"),
}
"""Shape of the checkpoint, and how its weights are packed."""
NUMBERS = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "auto"), "int8 KV": ("float32", "int8")}
"""Types of weights and of KV."""
HOW = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PARTS_GAP = 0.6
"""Of packed weights: each rank rounds rows of its own inputs to bytes, the reference whole rows. 0.55 was measured."""
Logits = Callable[[list[int]], torch.Tensor]


class Degrees(CheckedStack):
    """A stack with an instance of prefill for each number of ranks and stages, and one of decode for each of ranks."""

    def spawn(self, kind: str, service_id: str, arguments: Sequence[str]) -> ServiceProcess:
        """As in any stack; but a conductor whose policy is of a test cannot be rerun."""
        if kind == "conductor":
            return LocalStack.spawn(self, kind, service_id, arguments)
        return super().spawn(kind, service_id, arguments)

    def member_arguments(self, kind: str, service_id: str) -> list[str]:
        number = int(service_id.rpartition("-")[2])
        ranks, stages = PREFILLS[number] if kind == "prefill" else (RANKS[number], 1)
        settings = f"tensor_parallel_size={ranks}", f"pipeline_parallel_size={stages}"
        arguments = super().member_arguments(kind, service_id)
        return [*arguments, *(part for setting in settings for part in ("--set", setting))]


@dataclass(frozen=True)
class Served:
    """A running stack.

    Attributes:
        client: of its conductor.
        logits: of the model behind each token of a context.
        tolerance: largest gap between the model's best logit and a chosen token's.
        flips: tokens that may have a larger gap: where two experts nearly tie, another rounding chooses the other.
    """

    client: Client
    logits: Logits
    tolerance: float
    flips: int = 0

    def check(self, tenant: str, prompt: list[int]) -> int:
        """Ask the instances that the tenant names; return the prompt's tokens that were cached."""
        result = self.client.generate(token_ids=prompt, sampling=HOW, tenant=tenant)
        assert f"{result.placement.prefill}.{result.placement.decode}" == tenant
        output = result.token_ids
        assert len(output) == HOW.max_tokens
        rows = self.logits([*prompt, *output[:-1]])[-len(output) :]
        gaps = rows.amax(1) - rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        within = gaps.sort(descending=True).values[self.flips]
        assert float(within) <= self.tolerance, (output, gaps.tolist())
        return result.usage.cached_tokens


def model_of(folder: Path, quantization: Quantization, numbers: str) -> tuple[Logits, float]:
    """A checkpoint's logits and their tolerance."""
    packed = quantization != "none"
    if numbers == "int8 KV":
        with torch_kernels():
            runner = Runner(folder, torch.float32, blocks=256, stored=torch.int8, quantization=quantization)

        def logits(context: list[int]) -> torch.Tensor:
            with torch_kernels():
                return runner.step([(Sequence_(context), len(context))])

        return logits, INT8_GAP + (PACKED_GAP + PARTS_GAP) * packed
    exact, tolerance = Reference(folder), PACKED_GAP + PARTS_GAP if packed else GAP_TOLERANCE
    if packed:
        pack(exact.model, quantization)
    if numbers == "bfloat16":
        rounded = Reference(folder, torch.bfloat16)
        if packed:
            pack(rounded.model, quantization)
        tolerance += TIMES_ERROR * error_of(rounded, exact, tokens(400, "tolerance"))
    return exact.logits, tolerance


@pytest.fixture(scope="module", params=itertools.product(MODELS, NUMBERS), ids=lambda each: f"{each[0]}-{each[1]}")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """All instances of a model and of numbers; a request's tenant names two of them."""
    (shape, quantization), (dtype, kv) = MODELS[request.param[0]], NUMBERS[request.param[1]]
    folder = tmp_path_factory.mktemp("degrees")
    create(shape, folder / "model", seed=SEED, dtype="float32")
    plan = small_plan(folder / "model", folder)
    policies = "--policy", "tests.integration.named_places:NamedPrefill"
    plan = with_flags(plan, "conductor", *policies, "--set", "decode_policy=tests.integration.named_places:NamedDecode")
    for kind in ("prefill", "decode"):
        plan = with_flags(plan, kind, "--set", f"quantization={quantization}", "--set", "either_role=false")
    plan = dataclasses.replace(
        plan, dtype=dtype, kv_cache_dtype=kv, kvstore=0, prefill=len(PREFILLS), decode=len(RANKS)
    )
    logits, tolerance = model_of(folder / "model", quantization, request.param[1])
    with Degrees(plan) as stack, Client(stack.address) as client:
        experts = load_config(folder / "model").decoder.layers[-1].feed_forward.experts is not None
        yield Served(client, logits, tolerance, 2 if experts and dtype == "bfloat16" else 0)


@pytest.mark.parametrize("decode", range(len(RANKS)), ids=lambda number: f"to{RANKS[number]}")
@pytest.mark.parametrize(
    "prefill", range(len(PREFILLS)), ids=lambda number: "ranks{}-stages{}".format(*PREFILLS[number])
)
def test_the_tokens_are_the_models(served: Served, prefill: int, decode: int) -> None:
    """Of a prompt of two chunks, and again where prefill and decode have it."""
    tenant, prompt = f"prefill-{prefill}.decode-{decode}", tokens(75, f"{prefill} {decode}")
    assert served.check(tenant, prompt) == 0
    assert served.check(tenant, prompt) == 64
