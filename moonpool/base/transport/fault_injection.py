"""Injected faults, for fault storms: connections that break, and frames damaged after their checksum was taken.

Off unless the environment asks for faults:

    MOONPOOL_FAULT_BREAK_CONNECTIONS  share of the payloads before which this process breaks their connection, 0 to 1
    MOONPOOL_FAULT_CORRUPT_FRAMES   share of the frames that this process damages after their checksum was taken, 0 to 1
    MOONPOOL_FAULT_SEED             seed of the choice (default 0)
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping

from moonpool.base.errors import ConfigError
from moonpool.base.kv.frames import FRAME_BYTES, Slice, pack_frames
from moonpool.base.kv.layout import KVLayout
from moonpool.base.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

BREAK_CONNECTIONS = "MOONPOOL_FAULT_BREAK_CONNECTIONS"
SEED = "MOONPOOL_FAULT_SEED"
CONNECTION_BROKEN = "connection broken on purpose"
"""The event that is logged once for each connection that is broken."""
log = get_logger(__name__)
CORRUPT_FRAMES = "MOONPOOL_FAULT_CORRUPT_FRAMES"
HEADER_SHARE = 0.3
"""Share of damages that hit headers; other damages hit payloads."""
FRAME_DAMAGED = "frame damaged on purpose"
"""The event that is logged once for each damaged frame."""


class ConnectionBreaker:
    """Says when a connection is to break."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)

    def __call__(self) -> bool:
        """Whether to break the connection before the next payload."""
        if self._random.random() >= self._share:
            return False
        log.warning(CONNECTION_BROKEN, because=BREAK_CONNECTIONS)
        return True


def fault_share_from(environment: Mapping[str, str], name: str) -> float:
    """A share that the environment asks for; 0 by default.

    Raises:
        ConfigError: the share cannot be understood.
    """
    share = _number(environment, name, float)
    if not 0.0 <= share <= 1.0:
        raise ConfigError(name, f"must be in [0, 1], is {share:g}")
    return share


def fault_seed_from(environment: Mapping[str, str]) -> int:
    """The seed that the environment gives; raises as `fault_share_from`."""
    return int(_number(environment, SEED, int))


def connection_breaker_from(environment: Mapping[str, str]) -> ConnectionBreaker | None:
    """What the environment asks for; None for no fault; raises as `fault_share_from`."""
    share = fault_share_from(environment, BREAK_CONNECTIONS)
    return ConnectionBreaker(share, fault_seed_from(environment)) if share else None


def _number(environment: Mapping[str, str], name: str, kind: type[int] | type[float]) -> float:
    text = environment.get(name, "") or "0"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(name, f"must be a number, is {text!r}") from None


breaker = connection_breaker_from(os.environ)
"""This process' own; None when no connection is to break."""
Frame = tuple[kv_pb2.FrameHeader, list[memoryview]]


class FrameCorruptor:
    """Damages a share of passing frames.

    Attributes:
        damaged: frames damaged so far.
    """

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)
        self.damaged = 0

    def __call__(self, frame: Frame) -> Frame:
        """The frame, or a damaged copy; the memory that the pieces refer to does not change."""
        if self._random.random() >= self._share:
            return frame
        self.damaged += 1
        # One line for each: logs outlive a killed process, a counter inside does not.
        log.warning(FRAME_DAMAGED, frames_damaged=self.damaged, because=CORRUPT_FRAMES)
        header, pieces = frame
        if self._random.random() < HEADER_SHARE:
            return self._damaged_header(header), pieces
        return header, self._damaged_payload(pieces)

    def _damaged_header(self, header: kv_pb2.FrameHeader) -> kv_pb2.FrameHeader:
        damaged = kv_pb2.FrameHeader()
        damaged.CopyFrom(header)
        target = self._random.choice([damaged, *damaged.runs])
        name = self._random.choice([field.name for field in target.DESCRIPTOR.fields if field.name != "runs"])
        bit = 1 << self._random.randrange(5)
        if name == "slice_hashes":
            damaged.slice_hashes[self._random.randrange(len(damaged.slice_hashes))] ^= bit
        else:
            setattr(target, name, getattr(target, name) ^ bit)
        return damaged

    def _damaged_payload(self, pieces: list[memoryview]) -> list[memoryview]:
        """One bit is flipped, or the last byte is missing."""
        data = bytearray(b"".join(pieces))
        if self._random.random() < 0.2:
            del data[-1]
        else:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return [memoryview(data)]


def frame_corruptor_from(environment: Mapping[str, str]) -> FrameCorruptor | None:
    """What the environment asks for; None for no fault.

    Raises:
        ConfigError: A variable cannot be understood.
    """
    share = fault_share_from(environment, CORRUPT_FRAMES)
    return FrameCorruptor(share, fault_seed_from(environment)) if share else None


corruptor = frame_corruptor_from(os.environ)
"""This process' own; None without faults."""


def frames_to_send(
    transfer: int, generation: int, slices: Iterable[Slice], layout: KVLayout, target_bytes: int = FRAME_BYTES
) -> Iterator[Frame]:
    """As `pack_frames`; some frames are damaged if the environment asks for faults."""
    frames = pack_frames(transfer, generation, slices, layout, target_bytes)
    return frames if corruptor is None else map(corruptor, frames)


def frame_to_send(frame: Frame) -> Frame:
    """A ready frame; damaged if the environment asks for damage."""
    return frame if corruptor is None else corruptor(frame)
