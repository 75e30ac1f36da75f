"""A worker's half of the connector for vLLM."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group

from moonpool.base.telemetry.logs import get_logger
from moonpool.connectors.page_keys import rank_key
from moonpool.connectors.requests import BlockPlan
from moonpool.connectors.stores import EngineStores, Page, PageSettings
from moonpool.connectors.vllm_metrics import ConnectorStats
from moonpool.connectors.vllm_scheduler import RankLayout, StepPlan

log = get_logger(__name__)
FLUSH_S = 5.0
"""At the end, saves have so long."""


class WorkerHalf:
    """Moves the pages of one rank."""

    def __init__(self, kv_cache_config: Any, settings: PageSettings) -> None:
        self._cache_config, self._settings = kv_cache_config, settings
        self._stores: EngineStores | None = None
        self._regions: list[torch.Tensor] = []
        self._rank = 0
        self._arrangement = ""
        self._copier = ThreadPoolExecutor(1, "moonpool-kv")
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        self._failed: set[int] = set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """The engine has allocated its KV."""
        group = get_tp_group()
        self._rank = get_pp_group().rank_in_group * group.world_size + group.rank_in_group
        self._regions = regions_of(self._cache_config, caches)
        self._arrangement = arrangement_of(self._cache_config.num_blocks, caches, self._regions)

    def layout(self) -> RankLayout:
        """For the scheduler's half."""
        return RankLayout(self._arrangement)

    def _stores_of(self, plan: StepPlan) -> EngineStores:
        if self._stores is None:
            self._stores = EngineStores(self._settings, plan.namespace)
        return self._stores

    def begin_loads(self, plan: StepPlan) -> None:
        for load in plan.loads:
            pages = {rank_key(key, self._rank): self._new_page() for key in load.keys}
            stores = self._stores_of(plan)
            read = stores.load(load.tenant, load.chain, {key: _bytes_of(page) for key, page in pages.items()})
            read.add_done_callback(partial(self._read, load, list(pages.values())))

    def _read(self, load: BlockPlan, pages: Sequence[torch.Tensor], done: Future[list[bool]]) -> None:
        """Pages have come; copying them does not hold up the next ones."""
        self._copier.submit(self._take, load, pages, done)

    def _take(self, load: BlockPlan, pages: Sequence[torch.Tensor], done: Future[list[bool]]) -> None:
        """Copy what has come into the engine's blocks."""
        failed = set(load.blocks)
        try:
            whole = done.result()
            for block, page, there in zip(load.blocks, pages, whole, strict=True):
                if there:
                    self._fill(block, page)
                    failed.discard(block)
            if self._regions[0].is_cuda:
                torch.cuda.current_stream(self._regions[0].device).synchronize()
        except Exception:
            log.exception("a load has failed", request=load.request)
        finally:
            with self._lock:
                self._failed |= failed
                self._loaded.add(load.request)

    def save(self, plan: StepPlan) -> None:
        """Copy a step's new blocks, and send the copies in the background."""
        for save in plan.saves:
            stores = self._stores_of(plan)
            if not stores.accepts(len(save.blocks) * self._page_bytes):
                continue
            pages = [
                Page(rank_key(key, self._rank), rank_key(parent, self._rank), _bytes_of(self._page(block)))
                for key, parent, block in zip(save.keys, save.parents, save.blocks, strict=True)
            ]
            stores.save(save.tenant, save.chain, pages, save.asked_at)

    def take_loaded(self) -> set[str]:
        """Requests whose loads are over."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Blocks that could not be loaded."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def take_stats(self) -> ConnectorStats | None:
        """Return the counts since the last call."""
        counts = self._stores.take_counts() if self._stores is not None else {}
        return ConnectorStats(counts) if counts else None

    def close(self) -> None:
        """Finish saves, for a limited time."""
        if self._stores is not None:
            self._stores.flush(FLUSH_S)
            self._stores.close()
        self._copier.shutdown()

    @property
    def _page_bytes(self) -> int:
        return sum([region.shape[1] for region in self._regions])

    def _new_page(self) -> torch.Tensor:
        return torch.empty(self._page_bytes, dtype=torch.uint8, pin_memory=self._regions[0].is_cuda)

    def _page(self, block: int) -> torch.Tensor:
        """A copy of a block's bytes."""
        return torch.cat([region[block] for region in self._regions]).cpu()

    def _fill(self, block: int, page: torch.Tensor) -> None:
        at = 0
        for region in self._regions:
            region[block].copy_(page[at : at + region.shape[1]])
            at += region.shape[1]


def _bytes_of(page: torch.Tensor) -> memoryview:
    array: Any = page.numpy()
    return memoryview(array)


def regions_of(kv_cache_config: Any, caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Views [blocks, bytes of a block] that cover all layers' KV once, in the order of the layers."""
    regions: list[torch.Tensor] = []
    seen: set[int] = set()
    for place in kv_cache_config.kv_cache_tensors:
        name = next((layer for layer in place.layers if layer in caches), None)
        if name is None:
            continue
        span, start = kv_cache_config.num_blocks * place.block_stride, 0
        if place.layer_stride >= span:  # layers lie one after the other
            span, start = len(place.layers) * place.layer_stride, place.offset
        storage = caches[name].untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=caches[name].device).set_(storage)
        for region in raw[start : start + span].view(-1, kv_cache_config.num_blocks, place.block_stride):
            if region.data_ptr() not in seen:
                seen.add(region.data_ptr())
                regions.append(region)
    return regions


def arrangement_of(blocks: int, caches: Mapping[str, torch.Tensor], regions: Sequence[torch.Tensor]) -> str:
    """Describe what pages consist of; the description does not depend on how many blocks there are."""
    layers = []
    for name, cache in caches.items():
        at = list(cache.shape).index(blocks)
        inner = [dim for dim in range(cache.dim()) if dim != at]
        order = sorted(inner, key=lambda dim, cache=cache: -cache.stride(dim))  # type: ignore[misc]
        layers.append((name, [cache.shape[dim] for dim in order], order, str(cache.dtype)))
    return repr((layers, [region.shape[1] for region in regions]))
