"""An adapter in a cluster with TLS, beside an engine with TLS and a key."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import ConfigError, Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.telemetry.spans import Recorder
from moonpool.cli.certs import Authority
from moonpool.client import AsyncClient
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.service import conductor
from moonpool.interop.adapter.engine_http import EngineHttp
from tests.unit.base.rpc.certificates import issue, tls
from tests.unit.conductor.stack import TINY, WAIT_S, tiny
from tests.unit.interop.adapter.fake_vllm import answer_to, fake_vllm
from tests.unit.interop.adapter.test_adapter import GREEDY, adapter


def served(folder: Path) -> ssl.SSLContext:
    """What an engine at 127.0.0.1 shows."""
    Authority.at(folder).issue(folder, "client", "engine", ["127.0.0.1"], 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "engine.pem", folder / "engine.key")
    return context


async def test_answers_come_through_tls_on_both_sides(tmp_path: Path) -> None:
    def shown(role: str) -> dict[str, Any]:
        issue(tmp_path, role)
        return {
            "tls_ca": tmp_path / "ca.pem", "tls_cert": tmp_path / f"{role}.pem", "tls_key": tmp_path / f"{role}.key"
        }  # fmt: skip

    config = ConductorConfig(listen="127.0.0.1:0", id="conductor-0", model=str(TINY), **shown("conductor"))
    checkpoint, vocab = tiny(), tiny().config.vocab_size
    recorder, metrics = Recorder("conductor-0", None), PrometheusMetrics("conductor")
    async with (
        asyncio.timeout(WAIT_S),
        conductor(config, checkpoint, 7, recorder, metrics) as (servicer, address),
        fake_vllm(tmp_path, "one", vocab, served(tmp_path)) as engine,
        adapter(engine.url, address, "one", engine_ca=tmp_path / "ca.pem", **shown("adapter")),
        AsyncClient(address, tls=tls(tmp_path, "gateway"), timeout_s=WAIT_S) as client,
    ):
        while not servicer.cluster.registry.ready:
            await client.stats()  # each question lets the conductor go on
        prompt = list(range(40))
        result = await client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=5, **GREEDY))
        assert result.token_ids == answer_to(prompt, 5, vocab)
        await servicer.drain(0.0)


async def test_an_engine_that_nobody_vouches_for_is_not_used(tmp_path: Path) -> None:
    async with fake_vllm(tmp_path, "one", 100, served(tmp_path)) as engine:
        http = EngineHttp("vLLM", engine.url)
        with pytest.raises(Unavailable, match="certificate"):
            await http.get("/version")
        await http.aclose()
    with pytest.raises(ConfigError, match="engine_ca"):
        EngineHttp("vLLM", engine.url, ca=tmp_path / "none")
