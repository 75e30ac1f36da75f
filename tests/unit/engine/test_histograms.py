"""Steps, loads and sends of instances are observed under the role's name."""

import pytest

from moonpool.base.telemetry.prometheus import PrometheusMetrics, exposition
from moonpool.engine.histograms import EngineHistograms


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_is_observed_under_the_role_s_name(role: str) -> None:
    metrics = PrometheusMetrics("engine")
    EngineHistograms(metrics, role).step(0.25, 3, 7)
    lines = exposition(metrics.registry, "")[0].decode().splitlines()
    for name, value in (("seconds", 0.25), ("sequences", 3.0), ("tokens", 7.0)):
        assert f"moonpool_{role}_step_{name}_sum {value}" in lines
