"""Starts the engine that a specification asks for: processes, or the emulated one."""

from contextlib import AbstractAsyncContextManager

from moonpool.engine.emulated.engine import start_emulated
from moonpool.engine.handle import Engine
from moonpool.engine.launch import start_processes
from moonpool.engine.messages import EngineSpec
from moonpool.engine.process import OnLoading


def start_engine(
    spec: EngineSpec,
    *,
    start_timeout_s: float = 120.0,
    on_loading: OnLoading = lambda stage, layers, of: None,
) -> AbstractAsyncContextManager[Engine]:
    """Starts the engine's processes, or emulates them; leaving the context ends them and frees the pool.

    `on_loading` is told of each layer that a stage has loaded.

    Raises:
        ConfigError: A value of `spec` is refused (stages, blocks, device, memory).
        CheckpointError: The checkpoint cannot be loaded.
        DeadlineExceeded: Not ready within `start_timeout_s`.
        Unavailable: A worker died on its way up.
    """
    if spec.emulated is not None:
        return start_emulated(
            spec.emulated, spec.layout, spec.blocks, stages=spec.stages, gate_timeout_s=spec.gate_timeout_s
        )
    return start_processes(spec, start_timeout_s=start_timeout_s, on_loading=on_loading)
