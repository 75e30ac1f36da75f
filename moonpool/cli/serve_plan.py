"""The stack that the options of `moonpool serve` ask for."""

import os
from pathlib import Path

from moonpool.base.config import ENV_PREFIX
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.api_keys import hash_key
from moonpool.cli.models import pulled_model
from moonpool.cli.options import Engines, same_fields
from moonpool.cli.serve_options import ServeOptions
from moonpool.cli.settings import lora_settings, stack_settings
from moonpool.cli.stack import StackPlan

HTTP_PORT, CONDUCTOR_PORT = 8000, 50051


def serve_plan(options: ServeOptions) -> StackPlan:
    """The stack that `serve` is asked for; the model is fetched if need be.

    Raises:
        ConfigError: an option is wrong, or two options exclude each other; names the option.
        CheckpointError: there is no such model, or the model cannot be fetched.
    """
    given = [*_flag_settings(options), *(options.settings or ())]
    conductor_port = options.conductor_port
    if conductor_port is None:
        conductor_port = 0 if options.port == 0 else CONDUCTOR_PORT
    own = {
        "engines": _engines(options),
        "prefill": options.prefill or 1,
        "decode": options.decode or 1,
        "api_key_hashes": _key_hashes(options),
        "extra": stack_settings(options.config, given) if options.config or given else {},
        "alias": "" if Path(options.model).expanduser().exists() else options.model,
        "model": pulled_model(options.model),
        "data_dir": options.data_dir or Path(),
        "port": conductor_port,
        "http_port": HTTP_PORT if options.port is None else options.port,
    }
    return StackPlan(**same_fields(options, StackPlan) | own)


def _flag_settings(options: ServeOptions) -> list[str]:
    """The settings, as texts, that flags of `serve` stand for."""
    given = lora_settings(options.lora_modules or ())
    if options.api_keys is not None:
        given.append(f"gateway.api_keys={options.api_keys.resolve()}")
    if options.chat_template is not None:
        given += [f"{service}.chat_template={options.chat_template.resolve()}" for service in ("conductor", "gateway")]
    if names := options.served_model_name:
        given.append(f"gateway.served_model_name={','.join(names)}")
    engine = {
        "device": options.device,
        "max_model_len": options.max_model_len,
        "quantization": "" if options.quantization == "auto" else options.quantization,
        "tensor_parallel_size": options.tensor_parallel_size if options.tensor_parallel_size > 1 else None,
    }
    return [*given, *(f"engine.{name}={value}" for name, value in engine.items() if value)]


def _key_hashes(options: ServeOptions) -> tuple[str, ...]:
    """Hashes of the keys of --api-key; the environment's key gives way to a file of keys.

    Raises:
        ConfigError: keys and a file of keys are given, or a key is empty.
    """
    if not options.api_key:
        return ()
    if options.api_keys is not None:
        if options.api_key == os.environ.get(f"{ENV_PREFIX}API_KEY", "").split():
            return ()
        raise ConfigError("api_key", "give --api-key or --api-keys, not both")
    if not all(key.strip() for key in options.api_key):
        raise ConfigError("api_key", "must not be empty")
    return tuple(dict.fromkeys(map(hash_key, options.api_key)))


def _engines(options: ServeOptions) -> Engines:
    """Return how the engines are divided, as far as flags say.

    Raises:
        ConfigError: one engine, and a number of instances.
    """
    for name, count in (("prefill", options.prefill), ("decode", options.decode)):
        if count is not None:
            if options.engines == "one":
                raise ConfigError(name, f"--engines one has a single engine; leave out --{name} or --engines")
            return "split"
    return options.engines


def movable_ports(options: ServeOptions) -> frozenset[str]:
    """Fields of the plan with a port that nobody named: other ports do, if these are taken."""
    named = {"port": options.conductor_port, "http_port": options.port}
    return frozenset(name for name, port in named.items() if port is None)
