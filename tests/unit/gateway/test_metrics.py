"""Measures have vLLM's names and the right values."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from moonpool.base.errors import Overloaded, Unavailable
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.gateway.serving.metrics import AskedFor, GatewayMetrics
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import CHAT, answering


async def test_metrics() -> None:
    fake = FakeConductor(lambda _: answer([5, 6, 7], prompt_tokens=9, cached_tokens=8, loaded_tokens=3))
    async with answering(fake) as gateway:
        await gateway.chat(max_tokens=5)
        await gateway.chat(stream=True, max_tokens=5)
        assert [request.whole for request in fake.requests] == [True, False]
        for name, value in {
            "vllm:prompt_tokens_total": 18,
            "vllm:generation_tokens_total": 6,
            "vllm:prefix_cache_queries_total": 18,
            "vllm:prefix_cache_hits_total": 10,
            "vllm:external_prefix_cache_queries_total": 8,
            "vllm:external_prefix_cache_hits_total": 6,
            "vllm:request_prefill_kv_computed_tokens_sum": 2,
            "vllm:request_params_n_sum": 2,
            "vllm:request_params_max_tokens_sum": 10,
            "vllm:request_inference_time_seconds_count": 2,
            "vllm:time_per_output_token_seconds_count": 2,
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


async def test_requests_without_a_place_are_in_no_series_of_vllm() -> None:
    """Refused and wrong requests are counted as HTTP requests and by reason."""
    full = Overloaded("full", reason="queue_full", retry_after_s=1.0)
    async with answering(FakeConductor(lambda _: iter([full]))) as gateway:
        for stream in (False, True):
            assert (await gateway.chat(stream=stream)).status_code == 429
        assert (await gateway.chat(max_tokens="many")).status_code == 400
        assert (await gateway.http.get("/no/such/page")).status_code == 404
        text = (await gateway.http.get("/metrics")).text
        names = ("vllm:request_success_total{", "vllm:e2e_request_latency_seconds_count{", "vllm:time_to_first_token")
        assert not [line for line in text.splitlines() if line.startswith(names) and not line.endswith(" 0.0")]
        assert await gateway.metric('moonpool_gateway_refused_total{code="queue_full",status="429"}') == "2.0"
        assert await gateway.metric('vllm:num_requests_waiting{engine="0",model_name="tiny"}') == "0.0"
        labels = f'handler="{CHAT}",method="POST"'
        assert await gateway.metric(f'http_requests_total{{{labels},status="4xx"}}') == "3.0"
        assert await gateway.metric(f"http_request_duration_seconds_count{{{labels}}}") == "3.0"
        assert await gateway.metric('http_requests_total{handler="none",method="GET",status="4xx"}') == "1.0"
        assert await gateway.metric('http_requests_total{handler="/metrics",method="GET",status="2xx"}') != ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_behind_the_placement_counts_as_an_error(*, stream: bool) -> None:
    messages: Script = [answer([5])[0], Unavailable("the engine is gone")]
    async with answering(FakeConductor(lambda _: messages)) as gateway:
        await gateway.chat(stream=stream)
        reason = 'engine="0",finished_reason="error",model_name="tiny"'
        assert await gateway.metric(f"vllm:request_success_total{{{reason}}}") == "1.0"
        assert await gateway.metric('vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"}') == "1.0"


async def test_adapters_with_requests_are_told_to_routers() -> None:
    registry = PrometheusMetrics("gateway")
    metrics = GatewayMetrics(registry, lambda: 0.0)

    def told() -> dict[str, str]:
        (family,) = metrics.loras.collect()
        (sample,) = family.samples
        return dict(sample.labels)

    with metrics.request(AskedFor("law", lora="law")) as request, metrics.request(AskedFor("tiny")):
        assert told() == {"max_lora": "0", "waiting_lora_adapters": "law", "running_lora_adapters": ""}
        request.placed(whole=True)
        assert told() == {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": "law"}
    assert told() == {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}


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
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            assert await gateway.metric(f'vllm:{name}{{engine="0",model_name="tiny"}}') == "0.375"
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
