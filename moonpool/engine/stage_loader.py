"""Builds one stage's runner in an engine process: weights, device, KV, links, masks."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.base.families.ranks import decoder_of_rank
from moonpool.base.fork_server import preloaded_bytes
from moonpool.base.scheduling.steps import LayerDone
from moonpool.engine.channel import BlockingChannel
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import (
    EngineSizes,
    EngineSpec,
    Footprint,
    HiddenStates,
    LayersLoaded,
    StageDone,
    StageEvent,
    StageRoom,
    StageSpec,
    StageStarting,
    StageTokens,
)
from moonpool.engine.platforms.registry import collectives_of, engine_devices

if TYPE_CHECKING:
    from moonpool.engine.model_runner import StageRunner
    from moonpool.engine.models.stage import StageModel
    from moonpool.engine.parallel.ranks import Ranks
    from moonpool.engine.pipeline import Links
    from moonpool.engine.platforms.stage_platform import StagePlatform
    from moonpool.engine.structured_output import MaskBuilder


class StageLoader:
    """Builds one stage's runner, part by part. Torch is imported with the first of them.

    Args:
        spec: the stage's.
        pool_fd: descriptor for the stage's part of the KV pool.
        page_fd: descriptor for the page of the stage's ranks; of no use to a stage with one.
        gates: KV gates for the stage's steps.
        channel: to the I/O process.
        hidden_states: those of the stage before, if they come through the I/O process.
        sizes: waits for the answer to `StageRoom`.
        on_failure: called from another thread if a callback of a layer has failed.
    """

    def __init__(
        self,
        spec: StageSpec,
        pool_fd: int,
        page_fd: int,
        gates: KVGates,
        channel: BlockingChannel,
        hidden_states: queue.Queue[HiddenStates],
        sizes: Callable[[], EngineSizes],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        import torch

        from moonpool.base.checkpoint.formats import load_config
        from moonpool.base.kv.pool import PoolPart
        from moonpool.engine.footprint import resident_bytes
        from moonpool.engine.kernels.native import library
        from moonpool.engine.platforms.stage_platform import open_device

        self.spec, self.engine, self.gates, self.channel = spec, spec.engine, gates, channel
        self.hidden_states, self.on_failure = hidden_states, on_failure
        self.libraries_bytes = max(resident_bytes(), preloaded_bytes())
        channel.send(StageStarting("loading weights"))
        torch.set_num_threads(max(1, self.engine.threads))
        torch.set_num_interop_threads(1)
        self.config = load_config(Path(self.engine.checkpoint), self.engine.model_impl, self.engine.max_tokens)
        self.devices = engine_devices(self.engine.device, self.engine.stages, self.engine.ranks)
        self.device = open_device(self.devices[spec.stage][spec.rank])
        self.torch_device = torch.device("cpu") if self.device is None else self.device.torch_device
        _build_libraries(channel, engine=self.device is None)
        self.ranks = self._ranks(page_fd)
        self.model = self._load_weights()
        if not self.engine.sized:
            self.engine = self._sized(sizes)
        self.part = PoolPart.attach(
            pool_fd, self.engine.layout, self.engine.blocks, spec.layer_begin, spec.layer_end, self.engine.slots
        )
        self.native = library.get() if self.model.native else None

    def load(self) -> tuple[StageRunner, Footprint]:
        """Return the runner, and what the process will hold in memory.

        Raises:
            MoonpoolError: as `moonpool.engine.start_engine.start_engine` documents.
        """
        from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
        from moonpool.engine.footprint import decode_graph_rows, max_rows, max_sequence_tokens, prompt_graph_tokens
        from moonpool.engine.model_runner import StageRunner
        from moonpool.engine.models.lora import lora_slots
        from moonpool.engine.prompt_graphs import PromptGraphs
        from moonpool.engine.warm_up import warm_up

        platform, footprint = self._open_platform()
        longest = max_sequence_tokens(self.config, self.engine)
        first = self.ranks is None or self.ranks.first
        masks = self._mask_builder(footprint) if self.model.is_last and first else None
        timeout_s = self.engine.gate_timeout_s
        emit = self.channel.send if first else partial(_emit_as_further_rank, self.channel.send)
        runner = StageRunner(self.spec.stage, self.model, platform, self._links(), self.gates, emit, timeout_s, masks)
        runner.max_lora_rank = self.engine.max_lora_rank
        if self.device is not None and self.engine.max_loras:
            self.model.lora_slots = lora_slots(
                self.model.whole, self.model.layers, self.spec.layer_begin,
                count=self.engine.max_loras, max_rank=self.engine.max_lora_rank, ranks=self.ranks,
            )  # fmt: skip
        if self.native is not None:
            had = self.native.had
            runner.cpu_share = lambda steps: had()
        captures = self.device is not None and (self.ranks is None or self.ranks.captured)
        rows = decode_graph_rows(self.config, self.engine) if captures else 0
        if self.device is not None and rows:
            cache = GraphCache(longest, most_rows=rows, adapters=self.model.lora_slots is not None)
            runner.graphs = DecodeGraphs(self.device, self.model, platform.memory, cache, longest)
        most = prompt_graph_tokens(self.config, self.engine) if captures else 0
        if self.device is not None and most:
            runner.prompt_graphs = PromptGraphs(self.device, self.model, platform.memory, longest, most)
        if self.device is not None:
            warm_up(runner, max_rows(self.engine), longest, lambda what: self.channel.send(StageStarting(what)))
        return runner, footprint

    def _sized(self, sizes: Callable[[], EngineSizes]) -> EngineSpec:
        """Tell what the device has room for; return the specification with the sizes that follow from all stages."""
        assert self.device is not None, "a plain CPU has no memory of its own"
        capacity = self.device.capacity()
        weights = self.model.weight_bytes
        self.channel.send(StageRoom(capacity.total, capacity.free, capacity.processors, weights))
        found = sizes()
        return replace(self.engine, blocks=found.blocks, max_num_batched_tokens=found.max_num_batched_tokens)

    def _ranks(self, page_fd: int) -> Ranks | None:
        import torch.distributed

        from moonpool.engine.parallel.group_ranks import GroupRanks
        from moonpool.engine.parallel.page import RankPage
        from moonpool.engine.parallel.ranks import Ranks

        if self.engine.ranks == 1:
            return None
        page = RankPage(page_fd, self.spec.rank, self.engine.ranks, self.engine.step_timeout_s)
        if self.device is None:
            return Ranks(page)
        self.device.goes_on()
        its = self.devices[self.spec.stage]
        collectives = collectives_of(its, torch.distributed.is_backend_available)
        # Gloo's sums between GPUs go through the host.
        captured = collectives == its[0].platform.collectives
        return GroupRanks(page, self.spec.rank_store, collectives, self.torch_device, captured=captured)

    def _load_weights(self) -> StageModel:
        from moonpool.base.malloc import release_memory
        from moonpool.engine.models.loader import load_stage, torch_dtype
        from moonpool.engine.models.tensor_reader import KeptWeights

        engine, spec = self.engine, self.spec
        file = Path(engine.weights_file) if engine.weights_file and self.device is None else None
        imatrix = Path(engine.imatrix) if engine.imatrix else None
        model = load_stage(
            Path(engine.checkpoint),
            self.config,
            torch_dtype(engine.dtype),
            spec.layer_begin,
            spec.layer_end,
            self.torch_device,
            deterministic=engine.deterministic,
            kept=KeptWeights(engine.quantization, engine.int8_head and self.device is None, file, imatrix),
            on_layer=lambda done, of: self.channel.send(LayersLoaded(done, of)),
            ranks=self.ranks,
        )
        release_memory()  # what was unpacked on the way
        return model

    def _open_platform(self) -> tuple[StagePlatform, Footprint]:
        import torch

        from moonpool.base.pictures.limits import ROWS_BYTES
        from moonpool.engine.footprint import device_footprint, grammar_bytes, lora_bytes, work_bytes
        from moonpool.engine.platforms.kv_memory import rank_bytes
        from moonpool.engine.platforms.stage_platform import stage_platform

        config, engine, model = self.config, self.engine, self.model
        if self.device is not None:
            config = replace(config, decoder=decoder_of_rank(config.decoder, engine.ranks))
        loras = lora_bytes(config, engine, self.spec.layer_begin, self.spec.layer_end)
        pool = rank_bytes(self.part, engine.ranks)
        sizes = device_footprint(config, engine, weights=model.weight_bytes, pool=pool, loras=loras)
        beside = sizes.work + sizes.graphs + sizes.loras
        platform = stage_platform(self.device, self.part, self.on_failure, beside, self.ranks)
        work = work_bytes(config, engine, native=model.native, threads=torch.get_num_threads())
        if model.pictures is not None:
            work += ROWS_BYTES
        formats = grammar_bytes(config) if model.is_last else 0
        held = None if self.device is None else sizes
        kv_bytes = platform.memory.host_bytes
        return platform, Footprint(self.libraries_bytes, model.weight_bytes, kv_bytes, work, formats, held, loras)

    def _links(self) -> Links:
        import torch.distributed

        from moonpool.engine.models.loader import torch_dtype
        from moonpool.engine.pipeline import ChannelLinks, NoLinks, StageLinks

        engine = self.engine
        if engine.stages == 1:
            return NoLinks()
        if not self.spec.rendezvous:
            return ChannelLinks(
                self.spec.stage,
                engine.stages,
                self.hidden_states,
                self.channel.send if self.ranks is None or self.ranks.first else None,
                hidden_size=self.config.hidden_size,
                dtype=torch_dtype(engine.dtype),
                timeout_s=engine.step_timeout_s,
            )
        return StageLinks(
            Path(self.spec.rendezvous),
            self.spec.stage,
            engine.stages,
            collectives_of([its[self.spec.rank] for its in self.devices], torch.distributed.is_backend_available),
            device=self.torch_device,
            hidden_size=self.config.hidden_size,
            dtype=torch_dtype(engine.dtype),
            timeout_s=engine.step_timeout_s,
        )

    def _mask_builder(self, footprint: Footprint) -> MaskBuilder:
        from moonpool.base.checkpoint import Tokenizer
        from moonpool.engine.footprint import near_memory_limit
        from moonpool.engine.structured_output import MaskBuilder

        path, full = Path(self.engine.checkpoint), partial(near_memory_limit, footprint.bound)
        aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if self.native is not None:
            aside = self.native.aside
        vocab_size, ends = self.config.vocab_size, self.config.eos_token_ids
        masks = MaskBuilder(lambda: Tokenizer.load(path), vocab_size, ends, aside, full)
        self.channel.send(StageStarting("preparing structured answers"))
        masks.warm()
        return masks


def _emit_as_further_rank(send: Callable[[StageEvent], None], event: StageEvent) -> None:
    """Send what the I/O process hears of ranks that are not a stage's first: that they are done with an order."""
    if not isinstance(event, LayerDone | StageTokens) and not (isinstance(event, StageDone) and not event.over):
        send(event)


def _build_libraries(channel: BlockingChannel, *, engine: bool) -> None:
    """Build native code if need be, that of slices' hashes and the `engine`'s kernels; say that the start goes on."""
    from moonpool.base.kv import native_library, sealing
    from moonpool.base.native.build import BuildError, build
    from moonpool.engine.kernels.choice import VARIABLE

    def report(what: str) -> None:
        channel.send(StageStarting(what))

    native_library.build_ahead(report)
    sealing.prepare()  # now, not in the first step
    if engine and os.environ.get(VARIABLE, "native") in ("", "native"):
        with contextlib.suppress(BuildError):  # loading the library says why
            build(report=report)
