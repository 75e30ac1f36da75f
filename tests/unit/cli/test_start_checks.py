"""Faults of a model, of files and of settings, which are told before any service starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.errors import CheckpointError, ConfigError, UnsupportedModel
from moonpool.cli import start_checks
from moonpool.cli.serve import started_stack
from moonpool.cli.serve_options import ServeOptions
from moonpool.cli.serve_plan import serve_plan
from moonpool.cli.start_checks import check_start


def check(**options: Any) -> None:
    check_start(serve_plan(ServeOptions(**options)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be damaged."""
    return Path(shutil.copytree(model_dir(), tmp_path / "model"))


def test_a_whole_model_and_settings_pass() -> None:
    check()
    check(engine="emulated:llama-70b-a800")


def test_a_damaged_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a tokenizer"):
        check(model=str(model))


def test_an_unsupported_model(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "nonsense"}))
    with pytest.raises(UnsupportedModel, match="hidden_act"):
        check(model=str(model))


def test_weights_cut_short(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cut short"):
        check(model=str(model))


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"api_keys": "FILE"}, "api_keys", "line 1 is not of the form .* `moonpool keys create NAME --file FILE`"),
        ({"api_keys": "absent"}, "api_keys", "No such file .* `moonpool keys create"),
        ({"chat_template": "FILE"}, "chat_template", "end of template"),
        ({"chat_template": "absent"}, "chat_template", "absent"),
        ({"lora_modules": ["sql=absent"]}, "lora_modules.sql", "absent"),
        ({"settings": ["gateway.ssl_certfile=FILE", "gateway.ssl_keyfile=FILE"]}, "ssl_certfile", "file"),
        (
            {"settings": ["all.tls_cert=FILE", "all.tls_key=FILE", "all.tls_ca=absent"]},
            "tls_ca",
            "absent",
        ),
        (
            {"settings": ["engine.max_num_batched_tokens=16"]},
            "prefill.max_num_batched_tokens",
            r"one block \(\d+ tokens\)",
        ),
        ({"settings": ["engine.tensor_parallel_size=7"]}, "tensor_parallel_size", "7 ranks cannot divide layer 0"),
    ],
)
def test_what_a_setting_names(settings: dict[str, Any], field: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("nonsense {% if")

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(each) for each in value]
        found = value.replace("FILE", str(file))
        return Path(found) if value in ("FILE", "absent") else found

    with pytest.raises(ConfigError, match=says) as caught:
        check(**{name: named(value) for name, value in settings.items()})
    assert caught.value.field == field


def test_a_device_without_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch is not asked: its import takes seconds."""
    monkeypatch.setattr(start_checks, "DRIVERS", [str(tmp_path / "driver")])
    with pytest.raises(ConfigError, match="cuda:1 cannot be used: this machine has no driver of a GPU"):
        check(device="cuda:1")
    (tmp_path / "driver").touch()
    check(device="cuda:1")


def test_no_service_starts(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    plan = serve_plan(ServeOptions(model=str(model), data_dir=tmp_path / "data", port=0))
    with pytest.raises(CheckpointError), started_stack(plan, lambda service: None):
        pass
    assert not (tmp_path / "data").exists()
