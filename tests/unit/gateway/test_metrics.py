"""Measures have vLLM's names and the right values."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from moonpool.client.testing import FakeConductor, answer

from .fakes import answering


async def test_metrics() -> None:
    fake = FakeConductor(lambda _: answer([5, 6, 7], prompt_tokens=9, cached_tokens=8))
    async with answering(fake) as gateway:
        await gateway.chat()
        await gateway.chat(stream=True)
        for name, value in {
            "vllm:prompt_tokens_total": 18,
            "vllm:generation_tokens_total": 6,
            "vllm:prefix_cache_queries_total": 18,
            "vllm:prefix_cache_hits_total": 16,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:inter_token_latency_seconds_count": 4,
            "vllm:request_time_per_output_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:request_prompt_tokens_sum": 18,
            "vllm:request_generation_tokens_sum": 6,
        }.items():
            assert await gateway.metric(f'{name}{{model_name="tiny"}}') == f"{value:.1f}", name
        assert await gateway.metric('vllm:request_success_total{finished_reason="stop",model_name="tiny"}') == "2.0"


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
