"""Messages between an I/O process and engine processes: frozen, picklable, free of torch.

A *step* is one forward pass over a packed batch of sequences, run by all stages in sending order. Each stage has one
process, or several ranks; orders go to all of them. A rank that is not a stage's first answers `StageDone` and what
orders are answered by, and nothing else. `Step` goes to every stage; each stage answers `LayerDone` per layer (when
asked for) and one `StageDone`; the `StageDone` of the last stage carries the sampled tokens. If layers are reported,
the last stage also answers `StageTokens` as soon as there are tokens, before KV is hashed. A run is answered by one
`StageDone` for each step; only a single stage runs more than one. `OpenKVGateMessage`, `DropSequence`, `StopRunMessage`
and `AbortStageStep` may come at any time in between, even before the step has begun, and are ignored once the step is
done. Step ids grow from step to step. `FetchBlocks` is answered by one `BlocksFetched` from each stage, `LoadKV` by one
`KVLoaded`, `LoadLora` and `DropLora` by one `LoraAnswer`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from moonpool.base.checkpoint.config import ModelImpl
from moonpool.base.kv.layout import KVLayout
from moonpool.base.logprobs import Logprobs
from moonpool.base.quantization import Quantization
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import STEP_TOKENS, LayerDone, PlacedPicture, SampledCandidates, stage_ranges
from moonpool.engine.emulated.profile import EmulatedCompute
from moonpool.engine.platforms.registry import MEMORY_SHARE

MAX_FETCHES = 64
"""Fetches that are not answered yet, at most."""
WRITE_BACK_SHARE = 4
"""Write-back holds at most this fraction of the pool's blocks, by default."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine runs: the same for all stages."""

    checkpoint: str
    """Folder of the checkpoint (already resolved: engines never reach for a hub)."""
    dtype: str
    """Element type for weights and computing: "float32", "bfloat16" or "float16"."""
    layout: KVLayout
    """Arrangement of all layers' KV, and the KV's element type."""
    blocks: int
    """Blocks in the KV pool; 0 = as many as the device has room for (`moonpool.engine.sizes`)."""
    max_num_batched_tokens: int = STEP_TOKENS
    """Tokens of the largest step that is run; the work space is bounded by them. 0 = by the device's memory."""
    memory_share: float = MEMORY_SHARE
    """Share of the devices' memory, and of the host's free memory, that the engine takes for sizes that are 0."""
    stages: int = 1
    """Pipeline stages; each runs consecutive layers."""
    weights: bytes = b""
    """The checkpoint's `weights_fingerprint`; only stages on other hosts need one."""
    layer_costs: tuple[int, ...] = ()
    """What each layer takes, in any unit, for dividing them into stages; (): all take the same."""
    joined: frozenset[int] = frozenset()
    """Layers with which no stage begins (`DecoderSpec.joined`)."""
    ranks: int = 1
    """Engine processes of each stage; each computes some heads and inner states of the stage's layers."""
    threads: int = 0
    """Compute threads of each process at most; 0 = all cores where they are lent, else an equal part for each."""
    core_page: str = ""
    """File by which the engines of this host lend each other cores; "" = they do not."""
    core_share: int = 1
    """Share of the cores, relative to the others' shares, while all compute."""
    device: str = "cpu"
    """Devices of the stages' ranks, as `moonpool.engine.platforms.registry.engine_devices` reads them."""
    graph_rows: int = 64
    """Sequences of the largest decode step that is captured as a graph, where the device is not a plain CPU; 0 = there
    are no graphs, which are of no use to prefill."""
    graph_prompts: bool = True
    """The layers of prompt steps are captured as graphs, where the device is not a plain CPU."""
    int8_head: bool = False
    """The output head is held as bytes, too (`kernels.int8_head`), on a plain CPU; of no use to prefill."""
    model_impl: ModelImpl = "auto"
    """What computes the model: a family, or transformers' own code (`moonpool.base.checkpoint.load_config`)."""
    quantization: Quantization = "auto"
    """How weights are held: as the checkpoint has them, packed, or dense."""
    imatrix: str = ""
    """File by which int4 packing weighs the inputs; "" = all count the same."""
    weights_file: str = ""
    """Path without ending of a file that holds the weights, mapped, on a plain CPU; "" = they are in memory."""
    deterministic: bool = False
    """Results of a sequence do not depend on what else is in a step."""
    max_loras: int = 0
    """LoRA adapters that the engine holds at most; 0 = none."""
    max_lora_rank: int = 0
    """Largest rank of an adapter's projections."""
    max_tokens: int = 0
    """Longest sequence in tokens (prompt and output); 0 = the model's own limit. Bounds the warm-up's lengths."""
    gate_timeout_s: float = 30.0
    """A stage that waits so long for one gate aborts the step, seconds."""
    step_timeout_s: float = 300.0
    """A step that is not done after so long means a hung worker: the engine fails, seconds."""
    measure: bool = True
    """Time a few steps at start to learn `Engine.speeds`; off, the speeds are all defaults (tests)."""
    speeds: Speeds | None = None
    """Given as `Engine.speeds` in place of the speeds timed at start: a calibration's."""
    emulated: EmulatedCompute | None = None
    """Set if compute is emulated: then there is no engine process, and the checkpoint's weights are not read."""

    @property
    def stage_layers(self) -> list[tuple[int, int]]:
        """Each stage's layers, first and one past the last."""
        return stage_ranges(self.layout.layers, self.stages, self.joined, self.layer_costs)

    @property
    def slots(self) -> int:
        """Window slots of the pool (`KVLayout.window_slots`)."""
        return self.layout.window_slots(self.blocks, self.max_num_batched_tokens, self.max_tokens)

    @property
    def sized(self) -> bool:
        """Whether no size waits for what the devices have room for."""
        return self.blocks > 0 and self.max_num_batched_tokens > 0


@dataclass(frozen=True, slots=True)
class StageDone:
    """One stage is done with a step and no longer uses the step's blocks."""

    step_id: int
    stage: int
    sampled: tuple[int | None, ...]
    """One entry per sequence, None if no token was wanted; () from earlier stages and of an aborted step."""
    aborted: bool
    """Not all layers were computed; no token was sampled."""
    start_ns: int
    end_ns: int
    several: Mapping[int, SampledCandidates] = field(default_factory=dict)
    """As in `StepResult`, and so are the others."""
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    scores: Mapping[int, Logprobs] = field(default_factory=dict)
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    over: bool = True
    """No further step of the run follows."""
    share: float = 1.0
    waited_ns: int = 0
    pictures: tuple[PlacedPicture, ...] = ()
    earlier: "tuple[StageDone, ...]" = ()
    """Earlier steps of the run that were not reported yet, oldest first; they have none themselves."""


@dataclass(frozen=True, slots=True)
class StageTokens:
    """A step's tokens, which come again with the `StageDone` that follows; the step's blocks are in use until then."""

    done: StageDone


@dataclass(frozen=True, slots=True)
class OpenKVGateMessage:
    """The prefix's slices in this layer and all lower layers are in the pool."""

    step_id: int
    layer: int


@dataclass(frozen=True, slots=True)
class DropSequence:
    """Drop one sequence from the step; gates may open without the sequence's prefix from now on."""

    step_id: int
    index: int
    """Of the sequence in the step."""


@dataclass(frozen=True, slots=True)
class AbortStageStep:
    """Abort the step before the next layer."""

    step_id: int


@dataclass(frozen=True, slots=True)
class StopRunMessage:
    """End the run with the step under way."""

    step_id: int
    urgent: bool = False
    """That step must not wait for others any longer."""


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Store all KV of some blocks in the host's pool. No step that was sent writes to these blocks.

    Until then, a device keeps part-filled blocks in device memory.
    """

    number: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """A stage's answer to `FetchBlocks`."""

    number: int
    stage: int


@dataclass(frozen=True, slots=True)
class LoadKV:
    """Bring all KV that landed in the host's pool to the device, while steps run."""

    number: int = 0
    """0: no answer is wanted."""


@dataclass(frozen=True, slots=True)
class KVLoaded:
    """A stage's answer to `LoadKV`: the KV that had landed before the order is on the device."""

    number: int
    stage: int


@dataclass(frozen=True, slots=True)
class LoadLora:
    """Load a LoRA adapter, while steps run."""

    number: int
    lora: bytes
    """The adapter's id: the hash of the content that the folder must have."""
    folder: str


@dataclass(frozen=True, slots=True)
class DropLora:
    """Forget a LoRA adapter, behind the steps sent before."""

    number: int
    lora: bytes


@dataclass(frozen=True, slots=True)
class LoraAnswer:
    """A stage's answer to `LoadLora` or `DropLora`."""

    number: int
    stage: int
    nbytes: int = 0
    """Memory that the stage holds of the adapter."""
    failure: "WorkerFailed | None" = None
    """Why the adapter was not loaded."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """First message to a worker: the engine, and which stage of the pipeline and rank of the stage the worker is."""

    engine: EngineSpec
    stage: int
    rank: int
    layer_begin: int
    layer_end: int
    rendezvous: str
    """Private folder in which the stages' processes of this rank find each other; empty when there is one stage, or if
    stages are on several hosts: then hidden states go through the I/O process."""
    rank_store: str = ""
    """File by which the stage's ranks find each other, in a private folder; "" in the host's pool, where the page is
    enough."""


@dataclass(frozen=True, slots=True)
class StageStarting:
    """What a stage's start does now."""

    what: str


@dataclass(frozen=True, slots=True)
class LayersLoaded:
    """A stage has loaded one more layer: `layers` of `all_layers`."""

    layers: int
    all_layers: int


@dataclass(frozen=True, slots=True)
class StageRoom:
    """A stage's free device memory after loading the weights. Sent unless the engine is `sized`.

    Attributes:
        total: bytes of the device.
        free: bytes of them that are free.
        processors: multiprocessors of the device.
        weights: bytes that the stage holds.
    """

    total: int
    free: int
    processors: int
    weights: int

    @classmethod
    def least(cls, rooms: Iterable[Self]) -> Self:
        """Return what each of several ranks has at least."""
        found = list(rooms)
        total, free, processors = (min(getattr(room, n) for room in found) for n in ("total", "free", "processors"))
        return cls(total, free, processors, max(room.weights for room in found))


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The answer to all stages' `StageRoom`: sizes in place of zeros in `EngineSpec`."""

    blocks: int
    max_num_batched_tokens: int
    why: str
    """For people: what bounds the blocks."""


@dataclass(frozen=True, slots=True)
class DeviceFootprint:
    """One stage's bytes in device memory.

    Attributes:
        weights: the layers' weights.
        pool: KV, as large as the device's part of the host's pool.
        work: everything that steps need.
        graphs: captured graphs; 0 where there are none.
        loras: LoRA adapters, as many and as large as may be loaded.
    """

    weights: int
    pool: int
    work: int
    graphs: int
    loras: int = 0

    @property
    def bound(self) -> int:
        """Upper bound for the memory once the engine is ready, without the device driver's."""
        return self.weights + self.pool + self.work + self.graphs + self.loras

    def mebibytes(self) -> dict[str, int]:
        """Return the sizes in MiB, for a log line."""
        return {f"device_{name}_mib": size >> 20 for name, size in (asdict(self) | {"bound": self.bound}).items()}


@dataclass(frozen=True, slots=True)
class Footprint:
    """One engine process's bytes.

    Attributes:
        libraries: the program, before reading the checkpoint.
        weights: the layers' weights, once.
        pool: the process's part of the KV pool, shared with the I/O process, plus the device's pool if that is host
            memory, and the buffers through which KV comes and leaves.
        work: everything that steps need, but for what is in `formats`.
        formats: the tokenizer, grammars and parsers for answers with a given format; 0 but on the last stage.
        device: what is held in the memory of a device; None on a plain CPU. `weights`, `work` and `loras` count here,
            too.
        loras: LoRA adapters, as many and as large as may be loaded.
    """

    libraries: int
    weights: int
    pool: int
    work: int
    formats: int
    device: DeviceFootprint | None = None
    loras: int = 0

    @property
    def bound(self) -> int:
        """Upper bound of the memory once the engine is ready."""
        return self.libraries + self.weights + self.pool + self.work + self.formats + self.loras

    def mebibytes(self) -> dict[str, int]:
        """Return the sizes in MiB, for a log line."""
        names = ("libraries", "weights", "pool", "work", "formats", "loras", "bound")
        sizes = {f"{name}_mib": getattr(self, name) >> 20 for name in names}
        return sizes if self.device is None else sizes | self.device.mebibytes()


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The stage has loaded the layers and is linked to the neighbours."""

    load_s: float
    """Seconds of loading."""
    peak_bytes: int
    """Peak memory of the process until then, with libraries and mapped files."""
    footprint: Footprint
    """Upper bound for the memory from now on."""
    computing: str
    """What computes the steps, for people: kernels, whether layers run in one native call or why not, and graphs."""
    changed_weights: str = ""
    """Which quantised weights are not held as the checkpoint has them, for people; "" if all are."""
    mapped_bytes: int = 0
    """Of weights in a file that is mapped."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """A step's hidden states on the way to the next stage, through the I/O process: where stages are on several hosts.

    A stage sends one for each step, so that the next stage never waits for what will not come.
    """

    step_id: int
    rows: int
    """-1: the step was aborted, and there are no `data`."""
    data: bytes
    """[rows, hidden size] in the engine's `dtype`."""


StageEvent = LayerDone | StageTokens | StageDone | BlocksFetched | KVLoaded | LoraAnswer
"""What a stage emits."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker has failed; the worker exits after this message."""

    message: str
    kind: str = ""
    """Class name in moonpool.base.errors, for example "CheckpointError"; empty = Internal."""
    field: str = ""
    """The field at fault, if the error names one."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish the steps already sent, then exit."""
