"""What a simulated cluster consists of."""

from dataclasses import dataclass, field

from moonpool.cost import DEFAULT_BYTES_PER_S
from moonpool.engine.emulated.profile import Profile
from moonpool.errors import ConfigError
from simulator.kernel.calls import CallDelays
from simulator.traces.mooncake import BLOCK_TOKENS

GB = 10**9


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as good, seconds. A request's TBT is the mean of its longest 10 % of intervals (FAST'25)."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1


@dataclass(frozen=True, slots=True)
class DecodeMemory:
    """How a decode instance fills its pool.

    Attributes:
        growing: block tables grow with the sequence; otherwise room for `max_tokens` is taken at once.
        max_tokens: longest answer a request may ask for, as the instance must assume without growing.
        watermark: share of the pool that is left free when a sequence is let in.
        sharing: the samples of one request share its prompt's full blocks.
        restore: how a preempted sequence comes back: "swap", "recompute", or "cheaper" of the two by prediction.
    """

    growing: bool = True
    max_tokens: int = 4096
    watermark: float = 0.01
    sharing: bool = True
    restore: str = "cheaper"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster of equal instances.

    Attributes:
        profile: speeds and sizes of an instance.
        prefill, decode, kvstore: instances.
        policy: how prefill instances are chosen, see `simulator.cluster.placement`.
        threshold: Algorithm 1's balancing threshold.
        block_tokens: tokens of a KV block.
        step_tokens: tokens of one prefill step at most.
        max_batch: sequences of one decode step at most.
        pool_blocks: blocks of an instance's KV pool; 0 = what the profile's memory holds.
        store_bytes: DRAM of a kvstore.
        disk_bytes: SSD of a kvstore; 0 = none.
        disk_bytes_per_s: of reading it.
        eviction: the kvstores' policy.
        rate: times as quick as in the trace requests come.
        slo: for goodput, and for refusing.
        admission: who is let in, see `simulator.cluster.entrance`.
        keep_tbt: decode steps never hold more sequences than the TBT limit allows.
        delays: of calls between services.
        seed: of delays and of the policy "random".
        deadline_s: an attempt without an end after so long is given up and placed anew; 0 = never.
        attempts: of a request at most.
    """

    profile: Profile
    prefill: int = 8
    decode: int = 8
    kvstore: int = 1
    policy: str = "kvcache-centric"
    threshold: float = 1.0
    block_tokens: int = BLOCK_TOKENS
    step_tokens: int = 4096
    max_batch: int = 256
    pool_blocks: int = 0
    store_bytes: int = 1000 * GB
    disk_bytes: int = 0
    disk_bytes_per_s: float = 6.0 * GB
    eviction: str = "lru"
    rate: float = 1.0
    slo: Slo = field(default_factory=Slo)
    admission: str = "all"
    keep_tbt: bool = False
    memory: DecodeMemory = field(default_factory=DecodeMemory)
    delays: CallDelays = field(default_factory=CallDelays)
    seed: int = 0
    deadline_s: float = 0.0
    attempts: int = 5

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "block_tokens", "step_tokens", "max_batch", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, is {getattr(self, name)}")
        for name in ("rate", "disk_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be positive, is {getattr(self, name)}")

    @property
    def block_bytes(self) -> int:
        """Bytes of KV of a block."""
        return self.block_tokens * self.profile.token_bytes

    @property
    def blocks(self) -> int:
        """Blocks of an instance's pool."""
        return self.pool_blocks or max(1, self.profile.pool_bytes // self.block_bytes)

    @property
    def load_bytes_per_s(self) -> float:
        """Of the link from a kvstore to an instance."""
        return self.profile.speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S

    @property
    def transfer_bytes_per_s(self) -> float:
        """Of the link from prefill to decode."""
        return self.profile.speeds.transfer_bytes_per_s or DEFAULT_BYTES_PER_S

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def most_blocks(self, tokens: int, answer: int, samples: int) -> int:
        """Blocks that a decode instance must have for a request, with all its samples at their longest."""
        longest = tokens + (answer if self.memory.growing else max(answer, self.memory.max_tokens))
        shared = tokens // self.block_tokens if self.memory.sharing else 0
        return shared + samples * (self.blocks_for(longest) - shared)
