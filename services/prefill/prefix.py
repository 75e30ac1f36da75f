"""Loading a stored prefix, layer by layer, ahead of the computation that needs it.

Owns the streams to kvstores, the decision whether loading pays, and the copying into the pool. Knows nothing of steps.
A store that fails is left alone for a while, so that its absence costs one request one short deadline, not every one.
"""

import time
from collections.abc import Callable, Sequence

from moonpool.cost import SpeedTracker, load_is_cheaper, load_seconds
from moonpool.errors import MoonpoolError
from moonpool.kv.frames import DamagedSliceError
from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout
from moonpool.sched.prefill_scheduler import PrefillSequence
from moonpool.streams.credits import Traffic
from moonpool.streams.peers import Peers
from moonpool.streams.store_reader import PrefixLost, StoreReader
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import kv_pb2, prefill_pb2

PAUSE_S = 2.0
SLACK = 4.0
"""A load may take so many times its predicted seconds, and the configured timeout on top."""

log = get_logger(__name__)


class PrefixLoader:
    """Loads prefixes from kvstores.

    Args:
        open_reader: makes the client of a store at an address.
        layout: arrangement of the KV.
        write: takes `(layer, block, bytes, hash)` into the pool.
        tracker: knows what computing and loading take, and learns it.
        spans: where loading is recorded.
        timeout_s: longest time of a load beyond what is predicted.
    """

    def __init__(
        self,
        open_reader: Callable[[str], StoreReader],
        layout: KVLayout,
        write: Callable[[int, int, memoryview, int], None],
        tracker: SpeedTracker,
        spans: Recorder,
        timeout_s: float,
    ) -> None:
        self._stores = Peers(open_reader)
        self._layout = layout
        self._write = write
        self._tracker = tracker
        self._spans = spans
        self._timeout_s = timeout_s
        self.loaded_blocks = 0
        self.failures = 0

    @property
    def sessions(self) -> int:
        """Loads under way."""
        return self._stores.sessions

    @property
    def traffic(self) -> Traffic:
        """What is under way on the streams from all stores."""
        return self._stores.traffic

    def left_alone(self, store: kv_pb2.Instance) -> bool:
        """Whether a store has failed so lately that it is not asked now."""
        return self._stores.paused(store, time.monotonic())

    def worth(self, source: prefill_pb2.PrefixSource, sequence: PrefillSequence, reusable_blocks: int) -> int:
        """Leading blocks that the prompt should have after a load; 0 when loading does not pay."""
        if self.left_alone(source.instance):
            return 0
        layout = self._layout
        blocks = min(source.blocks, reusable_blocks)
        cheaper = load_is_cheaper(
            self._tracker.speeds,
            total_tokens=sequence.num_tokens,
            local_tokens=sequence.num_cached,
            stored_tokens=blocks * layout.block_tokens,
            token_bytes=layout.token_bytes,
            layers=layout.layers,
        )
        return blocks if cheaper else 0

    async def load(
        self,
        instance: kv_pb2.Instance,
        request_id: str,
        keys: Sequence[BlockKey],
        blocks: Sequence[int],
        on_layer: Callable[[int], None],
    ) -> int:
        """Loads blocks into the pool; nothing is written there once it has returned or raised.

        Args:
            instance: the kvstore.
            request_id: for the spans.
            keys: what to load.
            blocks: where to, in the same order.
            on_layer: told of each layer, in order, of which all blocks are there.

        Returns:
            Leading blocks that are there in all layers; fewer than asked for is a miss, whatever the cause.
        """
        layers, began_ns = range(self._layout.layers), time.monotonic_ns()
        last_ns, counts = began_ns, [0] * len(layers)

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            self._write(layer, blocks[index], data, value)
            counts[layer] += 1

        def layer_done(layer: int) -> None:
            nonlocal last_ns
            now_ns = time.monotonic_ns()
            size = counts[layer] * self._layout.slice_bytes
            self._spans.add("kv.load", last_ns, now_ns, request=request_id, layer=layer, bytes=size)
            last_ns = now_ns
            if counts[layer] == len(keys):
                on_layer(layer)

        nbytes = len(keys) * self._layout.block_bytes
        timeout_s = self._timeout_s + SLACK * load_seconds(self._tracker.speeds, nbytes)
        try:
            reader = await self._stores.get(instance)
            loaded = await reader.read(keys, layers=layers, on_slice=take, on_layer=layer_done, timeout_s=timeout_s)
        except PrefixLost as lost:
            log.info("prefix lost while loading", store=instance.id, request=request_id, reason=str(lost))
            loaded = 0
        except DamagedSliceError as damaged:
            log.warning("damaged slice while loading", store=instance.id, request=request_id, reason=str(damaged))
            loaded = 0
        except MoonpoolError as error:
            self.failures += 1
            self._stores.pause(instance, time.monotonic() + PAUSE_S)
            log.warning("load failed", store=instance.id, request=request_id, reason=str(error))
            loaded = 0
        if loaded == len(keys):
            self._tracker.observe_load(nbytes, (time.monotonic_ns() - began_ns) / 1e9)
        self.loaded_blocks += loaded
        return loaded

    async def aclose(self) -> None:
        """Closes all streams."""
        await self._stores.aclose()
