"""Stores, loads or deletes eight chunks by LMCache's plugin adapter. Run by the Python of LMCache's environment.

Arguments: the adapter's setting in JSON; store, load or delete.
"""

import argparse
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

COUNT, NUMBERS, WAIT_S = 8, 5000, 60.0
keys = [ObjectKey(at.to_bytes(32, "big"), "tiny", 0, cache_salt="s" * (at % 2)) for at in range(COUNT)]


class Listener(L2AdapterListener):  # type: ignore[misc]  # LMCache is not installed where Moonpool is checked
    """Counts what is gone."""

    gone = 0

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        """Chunks were stored."""

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        """Chunks were used."""

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        """Chunks are gone."""
        self.gone += len(keys)


def chunk(value: float) -> Any:
    """A chunk full of a number."""
    data = torch.full((NUMBERS,), value)
    nbytes = data.numel() * data.element_size()
    told = MemoryObjMetadata(data.shape, data.dtype, data.data_ptr(), nbytes, 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(data, told, parent_allocator=None)


def result(fd: int, query: Callable[[], Any]) -> Any:
    """The result of a task, which the descriptor announces."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (found := query()) in (None, {}):
        assert poll.poll(WAIT_S * 1000), "the task does not end"
    return found


spec = argparse.Namespace(l2_adapter=[sys.argv[1]])
adapter = create_l2_adapter(parse_args_to_l2_adapters_config(spec).adapters[0])
listener = Listener()
adapter.register_listener(listener)
objects = [chunk(at + 1.0) for at in range(COUNT)]


def store() -> Any:
    task = adapter.submit_store_task(keys, objects)
    return result(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]


match sys.argv[2]:
    case "store":
        print("stored", COUNT * store().is_successful(), "of", COUNT)
    case "load":
        task = adapter.submit_lookup_and_lock_task(keys, {})
        found = result(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
        targets = [chunk(0.0) for _ in range(COUNT)]
        task = adapter.submit_load_task(keys, targets)
        loaded = result(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        equal = [torch.equal(target.tensor, other.tensor) for target, other in zip(targets, objects, strict=True)]
        print(f"found {found.popcount()} of {COUNT}, loaded {loaded.popcount()}, equal {sum(equal)}")
    case "delete":
        assert store().is_successful()
        adapter.delete(keys)
        end = time.monotonic() + WAIT_S
        while listener.gone < COUNT and time.monotonic() < end:
            time.sleep(0.01)
        print(f"deleted {COUNT}, listeners know {listener.gone}")
print("healthy", adapter.report_status()["is_healthy"])
adapter.close()
