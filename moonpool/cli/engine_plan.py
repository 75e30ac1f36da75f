"""Which engines a local stack has, and what they hold in memory: decided and told before anything is loaded."""

import contextlib
import functools
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import CheckpointReport, inspect_checkpoint, kv_layout, resolve
from moonpool.base.checkpoint.weight_file import gives_large_pages
from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.kv.memory import available_bytes
from moonpool.base.scheduling.steps import STEP_TOKENS
from moonpool.cli.options import Engines
from moonpool.cli.progress import StartProgress
from moonpool.cli.stack import StackPlan, setting_of, stages_of
from moonpool.cli.tables import size_text
from moonpool.engine.emulated.profile import SCHEME
from moonpool.engine.memory_estimate import MemoryEstimate, estimated_memory
from moonpool.engine.messages import EngineSpec
from moonpool.engine.platforms.registry import engine_platform
from moonpool.engine.setup import DEFAULT_KV_BYTES, weights_folder

NATIVE = "all layers native"
"""How layers are computed where nothing is slow."""
LEAST_MAPPED_BYTES = 32 << 20
"""Weights of so many bytes are worth a file that engines share, and that later starts find."""
_ROOM = 1.1
"""Free bytes on the disk, as a multiple of the weights, before they are put into a file unasked."""
_ENGINE_KINDS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What one of a stack's engines will hold: bytes, tokens of the KV pool, and how layers are computed."""

    held: MemoryEstimate
    kv_tokens: int
    computed: str


def decide_engines(plan: StackPlan, *, one_client: bool) -> tuple[StackPlan, str]:
    """Decide whether a stack has one engine for prompts and answers, or prefill and decode instances.

    Args:
        plan: the stack; `engines` other than "auto" are the user's decision.
        one_client: one person or one program asks, a request after the other.

    Returns:
        The plan with engines "one" or "split", and a sentence for the user: why, and how to change it; "" if the user
        has decided.

    Raises:
        ConfigError: a single engine is asked for, and prefill has settings of its own.
    """
    if plan.engines == "one" and (apart := _settings_apart(plan)):
        why = f"one engine has no prefill instance, which has settings of its own: {apart}; decode's settings count"
        raise ConfigError("engines", why)
    if plan.engines != "auto":
        return plan, ""
    chosen, why = _chosen_engines(plan, one_client=one_client)
    what = "one engine computes prompts and answers" if chosen == "one" else "one engine for prompts, one for answers"
    other = "split has two" if chosen == "one" else "one has a single one, in less memory"
    return replace(plan, engines=chosen), f"{what}: {why}; --engines {other}"


def _chosen_engines(plan: StackPlan, *, one_client: bool) -> tuple[Engines, str]:
    if plan.engine.startswith(SCHEME):
        return "split", "compute is emulated as a cluster's"
    if plan.prefill != 1 or plan.decode != 1:
        return "split", f"{plan.prefill} + {plan.decode} instances are asked for"
    if plan.swap_roles or setting_of(plan, "conductor", "swap_roles", "") == "true":
        return "split", "instances change their roles"
    if plan.pipeline_parallel_size > 1:
        return "split", "prefill has stages"
    if apart := _settings_apart(plan):
        return "split", f"prefill has settings of its own, {apart}"
    if not _on_host(plan, "decode"):
        return "split", "on a GPU a step that has a prompt among answers is slow"
    memory = engine_memory(plan)
    shared = memory is not None and _maps_well(plan, memory.held.weights)
    if memory is not None and not memory.held.fits(free := available_bytes(), 2, shared=shared):
        assert free is not None
        return "one", f"two do not fit into the {free / 1e6:,.0f} MB that are free"
    if one_client:
        return "one", "it takes less memory, and a single client is as fast"
    return "split", "answers of several clients are not held up by prompts"


def _settings_apart(plan: StackPlan) -> str:
    """Name a setting that prefill has and decode has not, or has otherwise; "" for none."""
    ours, theirs = (set(pairwise(plan.extra.get(kind, ()))) for kind in _ENGINE_KINDS)
    apart = sorted(value if flag == "--set" else flag for flag, value in ours - theirs if flag.startswith("--"))
    if apart:
        return apart[0]
    devices = {setting_of(plan, kind, "device", "cpu") for kind in _ENGINE_KINDS}
    return "device" if len(devices) > 1 else ""


def tell_memory(plan: StackPlan, progress: StartProgress) -> StackPlan:
    """Tell what an engine will hold in memory, before anything is loaded. Problems are the services' to tell.

    Returns:
        The plan; with weights in a file that engines share and later starts find, if that costs no speed, or if
        engines together do not fit into the free memory.
    """
    memory = engine_memory(plan)
    if memory is None:
        return plan
    held, engines, free = memory.held, sum(plan.engine_counts.values()), available_bytes()
    text = memory_text(plan, memory)
    fits, shared = held.fits(free, engines), _share_layers(plan)
    mapped = held.weights >= LEAST_MAPPED_BYTES and _maps_well(plan, held.weights)
    if _left_open(plan) and (mapped or not fits):
        plan = _with_mapped_weights(plan)
        if shared:
            text += "; engines hold the weights once"
        if not held.fits(free, engines, shared=shared):
            assert free is not None
            text += f"; {size_text(free)} are free: weights are mapped from a file, and steps wait for the disk"
    progress.show("memory", text)
    progress.finish("memory")
    return plan


def memory_text(plan: StackPlan, memory: EngineMemory) -> str:
    """What the plan's engines hold, in a line; `moonpool show` tells the parts."""
    held, engines = memory.held, sum(plan.engine_counts.values())
    each = "the engine" if engines == 1 else f"each of {engines} engines"
    slow = "" if memory.computed == NATIVE else f"; {memory.computed}"
    return f"{size_text(held.idle)} for {each}, at most {size_text(held.all)}; KV of {memory.kv_tokens:,} tokens{slow}"


def _left_open(plan: StackPlan) -> bool:
    """Tell whether nobody has said how engines hold their weights."""
    return all(setting_of(plan, kind, "mmap_weights", "auto") == "auto" for kind in plan.engine_counts)


def _share_layers(plan: StackPlan) -> bool:
    """Tell whether several engines load the same layers."""
    stages = [stages_of(plan, kind) for kind, count in plan.engine_counts.items() for _ in range(count)]
    return len(stages) > len(set(stages))


def _maps_well(plan: StackPlan, nbytes: int) -> bool:
    """Tell whether engines can map weights of so many bytes from a file without a loss of speed."""
    if not all(_on_host(plan, kind) for kind in plan.engine_counts):
        return False
    folder = weights_folder()
    with contextlib.suppress(OSError):
        return shutil.disk_usage(_existing(folder)).free > _ROOM * nbytes and gives_large_pages(folder)
    return False


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _on_host(plan: StackPlan, kind: str) -> bool:
    """Tell whether engines of this kind compute in the host's memory."""
    return engine_platform(setting_of(plan, kind, "device", "cpu")).in_host_pool


def _with_mapped_weights(plan: StackPlan) -> StackPlan:
    flags = ("--set", "mmap_weights=on")
    return replace(plan, extra=dict(plan.extra) | {k: [*plan.extra.get(k, ()), *flags] for k in plan.engine_counts})


def engine_memory(plan: StackPlan) -> EngineMemory | None:
    """Return what an engine of the plan will hold; None for emulated compute, and where nothing can be told."""
    if plan.engine.startswith(SCHEME):
        return None
    with contextlib.suppress(MoonpoolError, ValueError):
        quantization: Any = setting_of(plan, "decode", "quantization", "auto")
        implementation: Any = setting_of(plan, "decode", "model_impl", "auto")
        found = inspected_model(plan.model, plan.dtype, plan.block_size, quantization, implementation)
        layout = kv_layout(found.config, found.dtype, plan.block_size, plan.kv_cache_dtype)
        kv_bytes = plan.kv_cache_memory_bytes or DEFAULT_KV_BYTES
        blocks = layout.blocks_in(kv_bytes, STEP_TOKENS, found.config.max_position_embeddings)
        most_loras, rank = (
            int(setting_of(plan, "decode", *asked)) for asked in (("max_loras", "0"), ("max_lora_rank", "16"))
        )
        spec = EngineSpec(
            plan.model, found.dtype, layout, blocks,
            quantization=quantization, threads=plan.threads, max_loras=most_loras, max_lora_rank=rank,
            max_tokens=found.config.max_position_embeddings,
            int8_head=_on_host(plan, "decode") and setting_of(plan, "decode", "int8_head", "auto") == "auto",
        )  # fmt: skip
        return EngineMemory(estimated_memory(found, spec), blocks * plan.block_size, found.computed)
    return None


@functools.lru_cache(maxsize=1)
def inspected_model(model: str, dtype: str, block_size: int, quantization: Any, model_impl: Any) -> CheckpointReport:
    """Return the checkpoint's sizes, whose headers are read once for all that is decided and told."""
    return inspect_checkpoint(resolve(model), dtype, block_size, quantization=quantization, model_impl=model_impl)
