"""`moonpool calibrate`: measures a model on this machine and writes a profile of emulated compute."""

import asyncio
import os
import platform
from pathlib import Path

import typer

from moonpool.checkpoint import kv_layout, load_config, model_name, resolve, resolve_dtype
from moonpool.engine.calibration import (
    ROOM_TOKENS,
    Fit,
    fit_decode_profile,
    fit_prefill_profile,
    measure_decode,
    measure_prefill,
)
from moonpool.engine.emulated.profile import load_profile
from moonpool.engine.messages import EngineSpec
from moonpool.engine.start import start_engine
from moonpool.engine.warmup import DecodeTime, PrefillTime, StepTimer
from moonpool.errors import ConfigError

BLOCK_TOKENS = 64
EMULATED_LAYERS = 8
"""Layers of the emulated KV at most."""
WIDE = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")

TEMPLATE = """\
# Measured by `moonpool calibrate`: {times} sizes of steps, the quickest of {repeats} each, least squares of relative
# errors. Error of the fit: prefill {prefill}, decode {decode}.
name: {name}
hardware: {hardware}
time_scale: 1.0

model:
  kv_bytes_per_token: {token_bytes}
  max_tokens: {max_tokens}

# Emulated KV: 16 bytes a token, layer and head.
kv:
  layers: {layers}
  kv_heads: 1

# Seconds of a step: base + per_token x tokens + per_pair x (token computed, token attended to).
prefill:
  base_s: {prefill.coefficients[0]:.4e}
  per_token_s: {prefill.coefficients[1]:.4e}
  per_pair_s: {prefill.coefficients[2]:.4e}

# Seconds of a step: base + per_sequence x batch + per_context_token x tokens of context of all sequences.
decode:
  base_s: {decode.coefficients[0]:.4e}
  per_sequence_s: {decode.coefficients[1]:.4e}
  per_context_token_s: {decode.coefficients[2]:.4e}

# No rates: KV is loaded and sent as fast as the emulating machine does it.
"""


def run_calibrate(model: str, out: Path, *, name: str, hardware: str, dtype: str, threads: int, repeats: int) -> None:
    """Measures, prints what was measured and how well it is explained, and writes the profile.

    Raises:
        ConfigError: the file cannot be written.
        MoonpoolError: the engine did not start, or failed.
    """
    folder = resolve(model)
    config = load_config(folder)
    kind = resolve_dtype(config, dtype)
    layout = kv_layout(config, kind, BLOCK_TOKENS)
    threads = threads or len(os.sched_getaffinity(0))
    spec = EngineSpec(
        checkpoint=str(folder),
        dtype=kind,
        layout=layout,
        blocks=layout.blocks_for(min(ROOM_TOKENS, config.max_position_embeddings)),
        threads=threads,
        max_tokens=config.max_position_embeddings,
        measure=False,
    )
    prefills, decodes = asyncio.run(_measure(spec, repeats))
    prefill, decode = fit_prefill_profile(prefills), fit_decode_profile(decodes)
    _show(prefills, prefill, decodes, decode)
    text = TEMPLATE.format(
        times=len(prefills) + len(decodes),
        repeats=repeats,
        name=name or out.stem,
        hardware=hardware or f"{_cores(threads)}, {model_name(model)} in {kind}",
        token_bytes=layout.token_bytes,
        max_tokens=config.max_position_embeddings,
        layers=min(config.num_layers, EMULATED_LAYERS),
        prefill=prefill,
        decode=decode,
    )
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("out", f"cannot write {out}: {error.strerror}") from error
    load_profile(str(out))
    typer.echo(f"written: {out}")


async def _measure(spec: EngineSpec, repeats: int) -> tuple[list[PrefillTime], list[DecodeTime]]:
    async with start_engine(spec) as engine:
        timer = StepTimer(engine)
        await timer.prefill(min(64, spec.max_tokens), times=2)  # memory, threads and code are touched
        prefills = await measure_prefill(engine, timer, max_tokens=spec.max_tokens, repeats=repeats)
        return prefills, await measure_decode(engine, timer, max_tokens=spec.max_tokens, repeats=repeats)


def _show(prefills: list[PrefillTime], prefill: Fit, decodes: list[DecodeTime], decode: Fit) -> None:
    typer.echo("prefill   chunk  prefix        ms   fit")
    for chunk, error in zip(prefills, prefill.errors, strict=True):
        typer.echo(f"         {chunk.tokens:6} {chunk.prefix:7} {chunk.seconds * 1e3:9.2f} {error:+6.1%}")
    typer.echo("decode    batch context        ms   fit")
    for batch, error in zip(decodes, decode.errors, strict=True):
        each = batch.context // batch.sequences
        typer.echo(f"         {batch.sequences:6} {each:7} {batch.seconds * 1e3:9.2f} {error:+6.1%}")
    for kind, fit in (("prefill", prefill), ("decode", decode)):
        typer.echo(f"fit error of {kind}: {fit}")


def _cores(threads: int) -> str:
    """The class of this machine's processor: architecture and widest vectors, never a name."""
    found = ""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        found = next((f" with {wide}" for wide in WIDE if wide in flags), "")
    except OSError:
        pass
    return f"{threads} {platform.machine()} cores{found}"
