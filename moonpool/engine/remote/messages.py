"""What a leader and a stage on another host say to each other, beside the messages of `moonpool.engine.messages`."""

from dataclasses import dataclass
from typing import Final

from moonpool.base.scheduling.steps import LayerDone, Step
from moonpool.engine.messages import (
    AbortStageStep,
    BlocksFetched,
    DropLora,
    DropSequence,
    EngineSizes,
    FetchBlocks,
    HiddenStates,
    KVLoaded,
    LayersLoaded,
    LoadKV,
    LoadLora,
    LoraAnswer,
    OpenKVGateMessage,
    Shutdown,
    StageDone,
    StageRoom,
    StageSpec,
    StageStarting,
    StageTokens,
    StopRunMessage,
    WorkerFailed,
    WorkerReady,
)
from moonpool.engine.remote.schema import Schema


@dataclass(frozen=True, slots=True)
class StageHello:
    """A stage's first message."""

    schema: bytes
    """Fingerprint of the messages both ways: `SCHEMA`."""
    version: str
    """Of Moonpool, for people."""
    node_rank: int
    """1 = the first stage that is not on the leader's host."""
    weights: bytes
    """The checkpoint's `weights_fingerprint`."""


@dataclass(frozen=True, slots=True)
class StageWelcome:
    """The leader's answer to an accepted hello: the stage's work follows as `StageSpec`, once all have joined."""

    stage: int


@dataclass(frozen=True, slots=True)
class StageRefusal:
    """The leader's answer to another hello."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ping:
    """The leader asks for a `Pong`; `sent_ns` is the leader's clock."""

    sent_ns: int


@dataclass(frozen=True, slots=True)
class Pong:
    """A stage's answer to `Ping`, with the time on the stage's own clock."""

    sent_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class KVSlice:
    """One layer's bytes in one block."""

    layer: int
    block: int
    value: int
    """The `slice_hash` of the data."""
    sealed: bool
    """The pool keeps the hash. False: a part-filled block, which is never sent to others."""
    data: bytes


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Blocks' window slots in the leader's pool have changed (`PoolPart.slot_of`)."""

    changes: tuple[tuple[int, int], ...]
    """Block, and slot or `NO_SLOT`."""


HELLO: Final = Schema((StageHello,))
ANSWER: Final = Schema((StageWelcome, StageRefusal))
TO_STAGE: Final = Schema(
    (
        StageSpec,
        EngineSizes,
        Step,
        OpenKVGateMessage,
        DropSequence,
        AbortStageStep,
        StopRunMessage,
        FetchBlocks,
        LoadKV,
        LoadLora,
        DropLora,
        HiddenStates,
        KVSlice,
        SlotChanges,
        Ping,
        Shutdown,
    )
)
"""What a leader sends to a stage that has joined."""
TO_LEADER: Final = Schema(
    (
        StageStarting,
        LayersLoaded,
        StageRoom,
        WorkerReady,
        WorkerFailed,
        LayerDone,
        StageTokens,
        StageDone,
        BlocksFetched,
        KVLoaded,
        LoraAnswer,
        HiddenStates,
        KVSlice,
        Pong,
    )
)
"""What a stage sends."""
SCHEMA: Final = TO_STAGE.fingerprint + TO_LEADER.fingerprint
