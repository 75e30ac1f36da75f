"""Clients of the three KV streams, and the halves that their servers share.

Prefill sends to decode (`TransferSender`), engines write to and read from a kvstore (`StoreWriter`, `StoreReader`);
servers use `check_hello`, `FrameReceiver`, `FrameWriter` and `Outbox`. Gathers what lies in smaller modules.
"""

from __future__ import annotations

from moonpool.kv.outbox import Outbox
from moonpool.kv.receiving import FrameReceiver, FrameWriter, check_hello
from moonpool.kv.store_reader import PrefixLost, StoreReader
from moonpool.kv.store_writer import PutOutcome, StoreWriter
from moonpool.kv.transfer_client import OutboundTransfer, TransferSender

__all__ = [
    "FrameReceiver",
    "FrameWriter",
    "OutboundTransfer",
    "Outbox",
    "PrefixLost",
    "PutOutcome",
    "StoreReader",
    "StoreWriter",
    "TransferSender",
    "check_hello",
]
