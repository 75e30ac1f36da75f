"""Measures have vLLM's names and the right values."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from moonpool.client.testing import FakeConductor, answer
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import answering


async def test_metrics() -> None:
    fake = FakeConductor(lambda _: answer([5, 6, 7], prompt_tokens=9, cached_tokens=8))
    async with answering(fake) as gateway:
        await gateway.chat()
        await gateway.chat(stream=True)
        assert [request.whole for request in fake.requests] == [True, False]
        for name, value in {
            "vllm:prompt_tokens_total": 18,
            "vllm:generation_tokens_total": 6,
            "vllm:prefix_cache_queries_total": 18,
            "vllm:prefix_cache_hits_total": 16,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:inter_token_latency_seconds_count": 2,
            "vllm:request_time_per_output_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:request_prompt_tokens_sum": 18,
            "vllm:request_generation_tokens_sum": 6,
            "vllm:request_decode_time_seconds_count": 2,
            "vllm:request_max_num_generation_tokens_sum": 6,
        }.items():
            assert await gateway.metric(f'{name}{{engine="0",model_name="tiny"}}') == f"{value:.1f}", name
        assert (
            await gateway.metric('vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}')
            == "2.0"
        )


def instance(name: str, blocks: int, load: pb.LoadReport) -> pb.InstanceState:
    kind = kv_pb2.INSTANCE_KIND_DECODE if name.startswith("decode") else kv_pb2.INSTANCE_KIND_PREFILL
    return pb.InstanceState(instance=kv_pb2.Instance(id=name, kind=kind), load=load, total_blocks=blocks)


async def test_routers_read_kv_preemptions_and_guesses_of_all_decode_instances() -> None:
    fake = FakeConductor(lambda _: answer([5]))
    fake.state.model.CopyFrom(pb.ModelInfo(name="tiny", layout=kv_pb2.KVLayout(block_size=64)))
    fake.state.instances.extend(
        [
            instance("prefill-0", 1000, pb.LoadReport()),
            instance("decode-0", 60, pb.LoadReport(free_blocks=10, cached_blocks=20, preemptions=3, draft_tokens=8)),
            instance("decode-1", 20, pb.LoadReport(free_blocks=20, preemptions=4, draft_tokens=1, accepted_tokens=5)),
        ]
    )
    async with answering(fake) as gateway:
        assert await gateway.metric('vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}') == "0.375"
        counted = {
            "num_preemptions": "7.0",
            "spec_decode_num_draft_tokens": "9.0",
            "spec_decode_num_accepted_tokens": "5.0",
        }
        for name, value in counted.items():
            assert await gateway.metric(f'vllm:{name}_total{{engine="0",model_name="tiny"}}') == value
        info = 'block_size="64",enable_prefix_caching="True",engine="0",num_gpu_blocks="80"'
        assert await gateway.metric(f"vllm:cache_config_info{{{info}}}") == "1.0"


async def test_without_a_cluster_the_gateways_own_metrics_are_there() -> None:
    fake = FakeConductor(lambda _: answer([5]))
    async with answering(fake) as gateway:
        fake.state.Clear()  # nobody has joined
        response = await gateway.http.get("/metrics")
    assert response.status_code == 200
    assert "vllm:num_requests_running" in response.text
    assert "vllm:kv_cache_usage_perc{" not in response.text


@pytest.mark.parametrize("escaping", ["", ";escaping=underscores"])
async def test_names_keep_their_colons_in_open_metrics(escaping: str) -> None:
    """As Prometheus asks for them."""
    accept = f"application/openmetrics-text;version=1.0.0{escaping},text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    fake = FakeConductor(lambda _: answer([5, 6, 7], prompt_tokens=9, cached_tokens=8))
    async with answering(fake) as gateway:
        await gateway.chat()
        response = await gateway.http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = text_string_to_metric_families(response.text)  # type: ignore[no-untyped-call]
    samples = {sample.name for family in families for sample in family.samples}
    assert {"vllm:num_requests_waiting", "vllm:prompt_tokens_total"} <= samples
