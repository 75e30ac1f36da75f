"""What would end the start of a stack's services, found out before any is started and told in one line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import ModelConfig, Tokenizer, load_config, resolve
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.config import LOOPBACK, assignments, config_class
from moonpool.base.errors import CheckpointError, ConfigError, UnsupportedModel
from moonpool.base.families.ranks import check_ranks
from moonpool.base.rpc.api_keys import ApiKeys
from moonpool.base.rpc.tls import Tls
from moonpool.cli.engine_plan import inspected_model
from moonpool.cli.stack import StackPlan, setting_of
from moonpool.engine.emulated.profile import emulated_profile
from moonpool.gateway.certificates import ReloadedCertificate

DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of these is there if a GPU can be used."""
_JOINS = ("--conductor", f"{LOOPBACK}:1")


def check_start(plan: StackPlan) -> None:
    """Read the model's small files, and all files that settings name.

    Raises:
        ConfigError: a setting is wrong, or a file that a setting names; names the setting.
        CheckpointError: the model's folder or file is incomplete, damaged or of an unsupported kind.
    """
    gateway = _settings(plan, "gateway", *_JOINS)
    conductor = _settings(plan, "conductor")
    engine = _settings(plan, min(plan.engine_counts, key=("prefill", "decode").index), *_JOINS)
    for config in (gateway, conductor, engine):
        Tls.of(config)
    if gateway.ssl_certfile is not None:
        ReloadedCertificate(gateway.ssl_certfile, gateway.ssl_keyfile)
    if gateway.api_keys is not None:
        with _remedy("`moonpool keys create NAME --file FILE` writes such a file"):
            ApiKeys(gateway.api_keys)
    for name, folder in assignments(conductor.lora_modules).items():
        with _naming("lora_modules", name):
            read_adapter(Path(folder))
    _check_model(plan, conductor.chat_template)


def _settings(plan: StackPlan, kind: str, *needed: str) -> Any:
    """The settings of a kind of service, as far as users decide them."""
    return config_class(kind).load(["--model", plan.model, *needed, *plan.extra.get(kind, ())])


def _check_model(plan: StackPlan, chat_template: Path | None) -> None:
    path = resolve(plan.model)
    config = load_config(path)
    Tokenizer.load(path)
    if chat_template is not None:
        with _naming("chat_template"):
            Tokenizer.load(path, chat_template)
    if emulated_profile(plan.engine, plan.time_scale) is None:
        for kind in plan.engine_counts:
            _check_devices(plan, kind, config)
        how: Any = {name: setting_of(plan, "decode", name, "auto") for name in ("quantization", "model_impl")}
        inspected_model(plan.model, plan.dtype, plan.block_size, **how)


def _check_devices(plan: StackPlan, kind: str, model: ModelConfig) -> None:
    device = setting_of(plan, kind, "device", "cpu")
    if device.startswith("cuda") and not any(map(os.path.exists, DRIVERS)):
        raise ConfigError("device", f"{device} cannot be used: this machine has no driver of a GPU")
    ranks = setting_of(plan, kind, "tensor_parallel_size", "1")
    if ranks.isdecimal():
        try:
            check_ranks(model.decoder, int(ranks), model.architecture)
        except UnsupportedModel as error:
            raise ConfigError(error.field, error.message) from None


@contextmanager
def _naming(setting: str, part: str = "") -> Iterator[None]:
    """Make errors about a file name the setting that names the file."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(".".join(filter(None, (setting, part))), str(error)) from None


@contextmanager
def _remedy(text: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.field, f"{error.message}; {text}") from None
