"""`moonpool calibrate`: measures a model on this machine and writes a profile of emulated compute."""

import asyncio
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moonpool.base.checkpoint import kv_layout, load_config, model_name, resolve, resolve_dtype
from moonpool.base.errors import ConfigError
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE, KVLayout
from moonpool.cli.whole_words import say
from moonpool.engine.calibration import (
    MAX_MEASURED_TOKENS,
    DecodeTime,
    PrefillTime,
    ProfileFit,
    StepTimer,
    fit_profile,
    measure_decode,
    measure_prefill,
)
from moonpool.engine.emulated.profile import load_profile
from moonpool.engine.messages import EngineSpec
from moonpool.engine.start_engine import start_engine

if TYPE_CHECKING:
    from moonpool.interop.adapter.base import EngineFacts

EMULATED_LAYERS = 8
"""Layers of the emulated KV at most."""
VECTOR_EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")
PROFILE_TEMPLATE = """\
# Measured by `moonpool calibrate`: {times} sizes of steps, the median of {repeats} tries each. Least squares of
# relative errors over half of the sizes; the errors on the other half, held out of the fit, are:
# prefill {prefill}; decode {decode}.
name: {name}
hardware: {hardware}
time_scale: 1.0

model:
  kv_bytes_per_token: {layout.token_bytes}
  kv_dtype: {layout.dtype}
  max_tokens: {max_tokens}

# Emulated KV: 16 bytes a token, layer and head.
kv:
  layers: {layers}
  kv_heads: 1

# Seconds of a step: base + per_token x tokens + per_pair x (token computed, token attended to)
# + per_context_token x tokens before those computed.
prefill:
  base_s: {prefill.coefficients[0]:.4e}
  per_token_s: {prefill.coefficients[1]:.4e}
  per_pair_s: {prefill.coefficients[2]:.4e}
  per_context_token_s: {prefill.coefficients[3]:.4e}

# Seconds of a step: base + per_sequence x batch + per_context_token x tokens of context of all sequences.
decode:
  base_s: {decode.coefficients[0]:.4e}
  per_sequence_s: {decode.coefficients[1]:.4e}
  per_context_token_s: {decode.coefficients[2]:.4e}

# No rates: KV is loaded and sent as fast as the emulating machine does it.
"""


def run_calibrate(
    model: str, out: Path, *, name: str, hardware: str, dtype: str, kv_cache_dtype: str, threads: int, repeats: int
) -> None:
    """Measure, fit, print times and errors of the fit, and write the profile.

    Raises:
        ConfigError: the file cannot be written, or the model is too short to be measured.
        MoonpoolError: the engine did not start, or failed.
    """
    folder = resolve(model)
    config = load_config(folder)
    kind = resolve_dtype(config, dtype)
    layout = kv_layout(config, kind, DEFAULT_BLOCK_SIZE, kv_cache_dtype)
    threads = threads or len(os.sched_getaffinity(0))
    spec = EngineSpec(
        checkpoint=str(folder),
        dtype=kind,
        layout=layout,
        blocks=layout.blocks_for(min(MAX_MEASURED_TOKENS, config.max_position_embeddings)),
        threads=threads,
        max_tokens=config.max_position_embeddings,
        measure=False,
    )
    prefills, decodes = asyncio.run(_measure(spec, repeats))
    hardware = hardware or f"{_hardware_class(threads)}, {model_name(model)} in {kind}"
    longest = config.max_position_embeddings
    _write(out, name, hardware, layout, config.num_layers, longest, repeats, (prefills, decodes))


def _write(
    out: Path,
    name: str,
    hardware: str,
    layout: KVLayout,
    layers: int,
    max_tokens: int,
    repeats: int,
    times: tuple[list[PrefillTime], list[DecodeTime]],
) -> None:
    """Fit, print, and write the profile; see `run_calibrate`."""
    prefills, decodes = times
    prefill, decode = fit_profile(prefills), fit_profile(decodes)
    _print_fit(prefills, prefill, decodes, decode)
    text = PROFILE_TEMPLATE.format(
        times=len(prefills) + len(decodes),
        repeats=repeats,
        name=name or out.stem,
        hardware=hardware,
        layout=layout,
        max_tokens=max_tokens,
        layers=min(layers, EMULATED_LAYERS),
        prefill=prefill,
        decode=decode,
    )
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("out", f"cannot write {out}: {error.strerror}") from error
    load_profile(str(out))
    say(f"written: {out}")


def run_calibrate_engine(make: str, url: str, model: str, out: Path, *, name: str, hardware: str, repeats: int) -> None:
    """Measure a running engine of another make, fit, print times and errors of the fit, and write the profile.

    Raises:
        ConfigError: the file cannot be written, or the engine is too small to be measured.
        MoonpoolError: the engine does not answer.
    """
    config = load_config(resolve(model))
    facts, prefills, decodes = asyncio.run(measure_engine(make, url, config.vocab_size, repeats))
    kind = resolve_dtype(config, "auto")
    hardware = hardware or f"{facts.version}, {model_name(model)} in {kind}"
    layout = kv_layout(config, kind, facts.block_size)
    _write(out, name, hardware, layout, config.num_layers, facts.max_tokens, repeats, (prefills, decodes))


async def measure_engine(
    make: str, url: str, vocab_size: int, repeats: int
) -> "tuple[EngineFacts, list[PrefillTime], list[DecodeTime]]":
    """An engine's description, given a URL, and the engine's step seconds. Raises Unavailable."""
    from moonpool.interop.adapter.calibration import EngineTimer
    from moonpool.interop.adapter.engine_http import EngineHttp
    from moonpool.interop.adapter.service import ENGINE_CLIENTS

    named, made = ENGINE_CLIENTS[make]
    client = made(EngineHttp(named, url))
    try:
        facts = await client.describe()
        timer = EngineTimer(client, facts, vocab_size, repeats)
        prefills = [PrefillTime(*step.size, step.seconds) for step in await timer.prefill()]
        decodes = [DecodeTime(batch, batch * context, seconds) for (batch, context), seconds in await timer.decode()]
        return facts, prefills, decodes
    finally:
        await client.aclose()


async def _measure(spec: EngineSpec, repeats: int) -> tuple[list[PrefillTime], list[DecodeTime]]:
    async with start_engine(spec) as engine:
        timer = StepTimer(engine)
        await timer.prefill(min(64, spec.max_tokens), times=2)  # the first step touches memory, threads and code
        prefills = await measure_prefill(engine, timer, max_tokens=spec.max_tokens, repeats=repeats)
        return prefills, await measure_decode(engine, timer, max_tokens=spec.max_tokens, repeats=repeats)


def _print_fit(prefills: list[PrefillTime], prefill: ProfileFit, decodes: list[DecodeTime], decode: ProfileFit) -> None:
    for kind, names, times, fit in (
        ("prefill", ("chunk", "prefix"), prefills, prefill),
        ("decode", ("batch", "context"), decodes, decode),
    ):
        typer.echo(f"{kind:8} {names[0]:>6} {names[1]:>7}        ms   error")
        for time in times:
            seen = "" if time in fit.held_out else "  fitted"
            typer.echo(f"{time.size[0]:15} {time.size[1]:7} {time.seconds * 1e3:9.2f}  {fit.error(time):+6.1%}{seen}")
    for kind, fit in (("prefill", prefill), ("decode", decode)):
        say(f"{kind}: {fit} on {len(fit.held_out)} sizes held out of the fit")


def _hardware_class(threads: int) -> str:
    """The class of this machine's processor: cores, architecture and widest vectors."""
    found = ""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        found = next((f" with {wide}" for wide in VECTOR_EXTENSIONS if wide in flags), "")
    except OSError:
        pass
    return f"{threads} {platform.machine()} cores{found}"
