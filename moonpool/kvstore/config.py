"""The settings of a kvstore."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moonpool.base.config import ByteSize, Folders, PeerAddresses, read_mapping
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.api_keys import ClientPortConfig
from moonpool.base.transport.config import TransportConfig
from moonpool.kvstore.eviction.policies import POLICIES
from moonpool.kvstore.eviction.tenants import QuotaKind, TenantRow, check_rows


def _policy_known(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}")
    return name


class KVStoreConfig(TransportConfig, ClientPortConfig):
    """Keeps KV blocks in DRAM and on SSD."""

    flag_groups: ClassVar = {
        "cluster": ("conductor",),
        "storage": ("data_dir", "dram_bytes", "ssd_bytes", "eviction", "durability"),
    }
    conductor: PeerAddresses = Field(
        (), description="HOST:PORT of the conductor to join; of several conductors, all are joined; default: run alone"
    )
    data_dir: Folders = Field((), description="folder of the SSD tier, one per disk; default: keep blocks in DRAM only")
    dram_bytes: ByteSize = Field(1 << 30, gt=0, description="budget of the DRAM tier in bytes")
    ssd_bytes: ByteSize = Field(
        16 << 30, ge=0, description="budget of each data_dir in bytes; 0 = keep blocks in DRAM only"
    )
    segment_bytes: ByteSize = Field(
        0, ge=0, description="bytes of one segment file, the unit in which SSD is reclaimed; 0 = a 64th of ssd_bytes"
    )
    durability: Literal["power", "process"] = Field(
        "power",
        description="what a block on SSD survives once it is DURABLE: power = the loss of power; process = only the "
        "death of this process, which spares the device all syncs (an orderly stop still writes everything)",
    )
    encryption_keys: Path | None = Field(
        None,
        description="file of keys that encrypt blocks on SSD, by tenant (`moonpool kvstore add-key` makes one); only "
        "this user may read it; default: blocks are stored in plaintext",
    )
    ssd_admission: Literal["all", "reused"] = Field(
        "all",
        description="what is written to the SSD tier: all blocks, or only blocks that are used again (read or put "
        "again, refused lately, or pinned), which spares the device",
    )
    ssd_write_bytes_per_s: ByteSize = Field(
        0, ge=0, description="bytes that may be written to the SSD tier in a second, on average; 0 = no limit"
    )
    eviction: Annotated[str, AfterValidator(_policy_known)] = Field(
        "lru", description=f"eviction policy of the DRAM tier: {', '.join(POLICIES)}"
    )
    read_threads: int = Field(4, ge=1, le=256, description="threads that read the SSD, for each data_dir")
    read_ahead_bytes: ByteSize = Field(
        64 << 20, gt=0, description="bytes that may be read from SSD before readers take them, all readers together"
    )
    window_bytes: ByteSize = Field(32 << 20, ge=1 << 20, description="bytes that one writer may be ahead of the store")
    max_transfers: int = Field(4096, ge=1, description="writing transfers open at once, and as many reading ones")
    transfer_timeout_s: float = Field(
        60.0, gt=0, description="seconds after which a transfer without progress is ended"
    )
    room_timeout_s: float = Field(10.0, gt=0, description="seconds a writing transfer may wait for room in DRAM")
    lease_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description="bytes of DRAM that all reading transfers together may keep from eviction; default: three quarters "
        "of dram_bytes",
    )
    pin_bytes: ByteSize | None = Field(
        None, ge=0, description="bytes of blocks that all pins together may keep; default: half of dram_bytes; 0 = none"
    )
    picture_share: float = Field(
        1 / 16,
        ge=0,
        lt=1,
        description="share of each tier for encoded pictures: the most that they may have, and what KV cannot take "
        "from them; KV uses what they leave; 0 = no pictures are kept",
    )
    tenants: Annotated[dict[str, TenantRow], BeforeValidator(read_mapping)] = Field(
        default_factory=dict,
        description="what tenants are granted, as YAML or JSON: {NAME: {dram_guarantee_bytes, dram_quota_bytes, "
        "ssd_guarantee_bytes, ssd_quota_bytes, pin_bytes}}, all optional; NAME '*' is for each tenant without a row. "
        "Others cannot evict a tenant below its guarantees; a quota is the most it may have",
    )

    @property
    def durable_bytes(self) -> int:
        return len(self.data_dir) * self.ssd_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.dram_bytes + self.durable_bytes

    @property
    def lease_budget_bytes(self) -> int:
        return self.dram_bytes * 3 // 4 if self.lease_bytes is None else self.lease_bytes

    @property
    def segment_size(self) -> int:
        return self.segment_bytes or max(1 << 20, min(self.ssd_bytes // 64, 1 << 30))

    @property
    def pin_budget_bytes(self) -> int:
        return self.dram_bytes // 2 if self.pin_bytes is None else self.pin_bytes

    @property
    def picture_dram_bytes(self) -> int:
        """DRAM for encoded pictures; guarantees of tenants come first."""
        return self._picture_bytes("dram", self.dram_bytes)

    @property
    def picture_ssd_bytes(self) -> int:
        """SSD for encoded pictures; guarantees of tenants come first."""
        return self._picture_bytes("ssd", self.durable_bytes)

    def _picture_bytes(self, tier: QuotaKind, capacity: int) -> int:
        granted = sum(row.guarantee(tier) for row in self.tenants.values())
        return min(int(self.picture_share * capacity), capacity - granted)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.encryption_keys is not None and not self.durable_bytes:
            raise ConfigError("encryption_keys", "needs data_dir: only blocks on SSD are encrypted")
        check_rows(self.tenants, self.dram_bytes, self.durable_bytes)
        if self.segment_bytes > self.ssd_bytes > 0:
            raise ConfigError("segment_bytes", f"must not exceed ssd_bytes ({self.ssd_bytes}), is {self.segment_bytes}")
        return self
