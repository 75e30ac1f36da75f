"""What must hold of placement in any cluster."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.scheduling.latency import Speeds, decode_step_seconds
from services.conductor.core.admission import AdmissionMode
from services.conductor.core.cluster_state import ClusterView
from services.conductor.core.events import Action, CallReserve, FailRequest, InstanceJoined, RequestArrived, RequestSpec
from services.conductor.core.instances import InstanceFacts
from services.conductor.core.latency_model import Demand, PrefillLatencyModel, SloLimits
from services.conductor.core.policies import POLICIES
from services.conductor.core.scheduler import ConductorCore

from .world import LIMITS
from .worlds import SHAPE, World, facts

SECONDS = st.sampled_from([0.0, 1e-4, 3e-3, 0.2])
SPEEDS = st.builds(
    Speeds,
    prefill_base_s=SECONDS,
    prefill_per_token_s=st.sampled_from([1e-4, 1.04e-4, 2e-3, 0.1]),
    prefill_per_pair_s=st.sampled_from([0.0, 1e-7]),
    decode_base_s=st.sampled_from([1e-3, 1.3e-3, 0.05]),
    decode_per_sequence_s=SECONDS,
    decode_per_context_token_s=st.sampled_from([0.0, 1e-6]),
)
ENGINES = st.lists(st.tuples(SPEEDS, st.sampled_from([1, 2, 4]), st.sampled_from([0, 16, 256])), min_size=1, max_size=8)
FACTORS = st.sampled_from([0.5, 0.99, 1.0, 1.01, 4.0])


def prefills(engines: list[tuple[Speeds, int, int]]) -> list[InstanceFacts]:
    return [
        facts(f"prefill-{number}", speeds=speeds, stages=stages, step_tokens=step_tokens)
        for number, (speeds, stages, step_tokens) in enumerate(engines)
    ]


def alone_s(one: InstanceFacts, tokens: int) -> float:
    """Predicted time to first token when nobody else is there."""
    demand = Demand(tokens, SHAPE.blocks_for(tokens), SHAPE.blocks_for(tokens), 1)
    return PrefillLatencyModel(demand, SHAPE, (), 1.0).cost(one.speeds, one.stages, one.step_tokens, 0).alone_s


@settings(deadline=None, max_examples=150)
@given(ENGINES, ENGINES, st.integers(1, 600), FACTORS, FACTORS, st.sampled_from(AdmissionMode))
def test_an_idle_cluster_refuses_only_what_nobody_could_keep(
    computing: list[tuple[Speeds, int, int]],
    decoding: list[tuple[Speeds, int, int]],
    tokens: int,
    ttft_factor: float,
    tbt_factor: float,
    admission: AdmissionMode,
) -> None:
    engines = prefills(computing)
    decodes = [facts(f"decode-{number}", speeds=speeds) for number, (speeds, *_) in enumerate(decoding)]
    slo = SloLimits(
        ttft_factor * min(alone_s(one, tokens) for one in engines),
        tbt_factor * min(decode_step_seconds(one.speeds, 1, tokens) for one in decodes),
    )
    core = ConductorCore(replace(LIMITS, admission=admission), ClusterView())
    out: list[Action] = []
    for one in (*engines, *decodes):
        core.handle(0.0, InstanceJoined(one), out)
    core.handle(0.0, RequestArrived(RequestSpec(1, "r1", tokens, 8, b"key", slo, 0.0, 600.0), ()), out)
    refused = [action.failure.reason for action in out if isinstance(action, FailRequest)]
    limits = [("ttft_slo", ttft_factor), ("tbt_slo", tbt_factor)] if admission is not AdmissionMode.NONE else []
    assert refused == [reason for reason, factor in limits if factor < 1][:1]
    assert len([action for action in out if isinstance(action, CallReserve)]) == 1 - len(refused)


@settings(deadline=None, max_examples=150)
@given(
    SPEEDS,
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0.0, 0.5, 3.0, 40.0])), min_size=2, max_size=12),
    st.integers(1, 64),
)
def test_a_prompt_of_one_step_goes_to_a_wide_pipeline_only_where_it_is_free_sooner(
    speeds: Speeds, pipelines: list[tuple[int, float]], tokens: int
) -> None:
    found = World(facts("decode-0"), *prefills([(speeds, stages, 64) for stages, _ in pipelines]))
    for number, (_, drain_s) in enumerate(pipelines):
        found.report(f"prefill-{number}", drain_s=drain_s)
    stages, queue_s = pipelines[int(found.plan(tokens).prefill.id.removeprefix("prefill-"))]
    assert all(other_s > queue_s for width, other_s in pipelines if width < stages)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(list(POLICIES)), ENGINES, st.integers(0, 99), st.lists(st.integers(1, 600), max_size=12))
def test_equal_histories_give_equal_placements(
    policy: str, computing: list[tuple[Speeds, int, int]], seed: int, prompts: list[int]
) -> None:
    def placed() -> list[tuple[str, str]]:
        found = World(facts("decode-0"), *prefills(computing), policy=POLICIES[policy], seed=seed)
        return [found.serve(now=number / 10, tokens=tokens) for number, tokens in enumerate(prompts)]

    assert placed() == placed()
