"""What `moonpool serve` makes of its flags, and which ports a stack takes."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.config import config_class
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.api_keys import ApiKeys
from moonpool.cli.serve import free_ports, open_word
from moonpool.cli.serve_options import ServeOptions
from moonpool.cli.serve_plan import movable_ports, serve_plan
from moonpool.cli.stack import GATEWAY_ID, LocalStack, StackPlan
from moonpool.gateway.config import GatewayConfig


def gateway_config(plan: StackPlan) -> GatewayConfig:
    """The settings with which the plan's stack starts a gateway at port 7."""
    stack = LocalStack(plan)
    stack.addresses = ["127.0.0.1:1"]
    return GatewayConfig.load(stack.gateway_arguments(7))


def plan_of(**options: Any) -> StackPlan:
    return serve_plan(ServeOptions(**options))


def test_the_flags_that_everybody_knows() -> None:
    plan = plan_of(device="cuda", dtype="float16", max_model_len=9, quantization="int8", settings=["engine.device=cpu"])
    engine = config_class("decode").load(
        ["--model", "m", "--conductor", "host:1", "--dtype", plan.dtype, *plan.extra["decode"]]
    )
    found = engine.model_dump(include={"device", "dtype", "max_model_len", "quantization"})
    assert found == {"device": "cpu", "dtype": "float16", "max_model_len": 9, "quantization": "int8"}
    assert plan.extra["prefill"] == plan.extra["decode"]


def test_devices_share_layers_at_both_kinds_of_engine() -> None:
    assert not any("tensor_parallel_size" in flag for flag in plan_of().extra.get("decode", ()))
    for kind in ("prefill", "decode"):
        assert "tensor_parallel_size=2" in plan_of(tensor_parallel_size=2).extra[kind]


def test_clients_know_the_model_by_the_name_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gateway_config(plan_of(model="bundled")).served_model_name == ("tiny", "bundled")
    assert gateway_config(plan_of(model=str(model_dir()))).served_model_name == ()
    assert gateway_config(plan_of(model="bundled", served_model_name=["a", "b"])).served_model_name == ("a", "b")
    monkeypatch.setenv("MOONPOOL_SERVED_MODEL_NAME", "c")
    assert gateway_config(plan_of(model="bundled")).served_model_name == ("c",)
    assert (plan_of(model="bundled").name, plan_of().name) == ("bundled", "tiny")


def test_keys_are_asked_for(tmp_path: Path) -> None:
    config = gateway_config(plan_of(api_key=["secret", "other"], data_dir=tmp_path))
    assert config.api_keys is not None
    assert config.api_keys.stat().st_mode & 0o777 == 0o600
    assert "secret" not in config.api_keys.read_text()
    assert (ApiKeys(config.api_keys).tenant("other"),) == config.operator_tenants, "the page shows all"
    assert config.api_keys.is_relative_to(tmp_path / GATEWAY_ID)
    with pytest.raises(ConfigError, match="api_key: must not be empty"):
        plan_of(api_key=[""])
    with pytest.raises(ConfigError, match="give --api-key or --api-keys, not both"):
        plan_of(api_key=["secret"], api_keys=tmp_path / "keys")


def test_a_key_of_the_environment_gives_way_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_API_KEY", "secret")
    file = tmp_path / "keys"
    file.touch()
    assert plan_of(api_key=os.environ["MOONPOOL_API_KEY"].split(), api_keys=file).api_key_hashes == ()


@pytest.mark.parametrize(
    ("host", "listen", "reached"),
    [
        ("0.0.0.0", "0.0.0.0:7", "127.0.0.1:9"),
        ("::", "[::]:7", "[::1]:9"),
        ("10.0.0.5", "10.0.0.5:7", "10.0.0.5:9"),
        ("127.0.0.1", "127.0.0.1:7", "127.0.0.1:9"),
    ],
)
def test_other_machines_are_let_in_with_a_word(
    host: str, listen: str, reached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(host=host, data_dir=tmp_path)
    config = gateway_config(plan)
    assert (config.listen, config.advertised(9)) == (listen, reached)
    assert bool(open_word(plan)) == (host != "127.0.0.1")
    assert not open_word(plan_of(host=host, api_key=["k"]))
    monkeypatch.setenv("MOONPOOL_API_KEYS", "keys")
    assert not open_word(plan)


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", port)) as server:
        yield server.getsockname()[1]


def test_ports_that_nobody_named_give_way() -> None:
    with listening() as taken:
        plan = StackPlan("m", Path(), port=taken, http_port=taken, conductors=2)
        port, http_port = free_ports(plan, ["port", "http_port"], [taken + 2])
        assert port >= taken + 3, "two in a row, and none of a stack that starts"
        assert http_port > taken
        assert http_port != taken + 2
        assert free_ports(plan, [], []) == (taken, taken), "to be refused with the flag's name"
        assert free_ports(StackPlan("m", Path(), http_port=None), ["port", "http_port"], []) == (0, 0)


def test_which_ports_are_named() -> None:
    assert movable_ports(ServeOptions()) == {"port", "http_port"}
    assert movable_ports(ServeOptions(port=8000)) == {"port"}
    plan = plan_of(port=0)
    assert (plan.port, plan.http_port) == (0, 0), "any free ones"
