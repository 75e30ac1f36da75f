"""Settings are refused as every service's are: one line with the name, exit code 2."""

from pathlib import Path

import pytest

from moonpool.base.rpc.process import EXIT_CONFIG
from moonpool.gateway.__main__ import main
from moonpool.gateway.config import GatewayConfig

NEEDED = ["--conductor", "127.0.0.1:50051", "--model", "tiny"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "tiny"], "conductor: is needed"),
        (["--conductor", "127.0.0.1:50051"], "model: is needed"),
        ([*NEEDED, "--conductor", "127.0.0.1:0"], "conductor: must be an address that can be reached"),
        ([*NEEDED, "--listen", "8000"], "listen: must be HOST:PORT"),
        ([*NEEDED, "--set", "max_body_bytes=10"], "max_body_bytes: "),
        ([*NEEDED, "--tool-call-parser", "xml"], "tool_call_parser: must be one of auto, none, kimi_k2, "),
        ([*NEEDED, "--reasoning-parser", "xml"], "reasoning_parser: must be one of auto, none, openai_gptoss, "),
        ([*NEEDED, "--http-port", "80"], "no such flag"),
    ],
)
def test_wrong_settings(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert said.startswith("gateway: ")
    assert said.count("\n") == 1
    assert says in said


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable, as compose.yaml gives it, means the default."""
    monkeypatch.setenv("MOONPOOL_API_KEYS", "")
    config = GatewayConfig.load(NEEDED)
    assert (config.listen, config.api_keys) == ("127.0.0.1:8000", None)
    monkeypatch.setenv("MOONPOOL_API_KEYS", "keys")
    assert GatewayConfig.load(NEEDED).api_keys == Path("keys")
