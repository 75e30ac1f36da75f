"""Clients with API keys at a store with TLS: their own values, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.blocks import BlockFormat
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.picture_rows import PICTURE_NAMESPACE
from moonpool.base.kv.values import value_key, value_namespace
from moonpool.base.rpc.api_keys import ApiKeys, hash_key
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.roles import RoleGate
from moonpool.base.rpc.server import serving
from moonpool.base.rpc.tls import Security, Tls
from moonpool.client.kv import AsyncKVClient, PermissionDenied, Unauthenticated
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.rpc.certificates import tls
from tests.unit.clocks import hurried
from tests.unit.kvstore.helpers import LAYOUT
from tests.unit.kvstore.rig import KEYS, Rig, failure, opened_get, rig

NAME = "engine/model"


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[tuple[Rig, str, str]]:
    """A store, where engines reach it, and where clients with keys do."""
    keys = folder / "keys"
    keys.write_text(f"sha256:{hash_key('ann-key')} ann\nsha256:{hash_key('bob-key')} bob\n")
    security = Security(tls(folder, "kvstore"), RoleGate(None, ApiKeys(keys), hurried()), "127.0.0.1:0")
    async with (
        rig(dram_bytes=1 << 20) as store,
        serving("127.0.0.1:0", [store.service.contract], grace_s=0, security=security) as server,
    ):
        yield store, server.address, server.client_address


def client_of(folder: Path, address: str, key: str, tenant: str = "") -> AsyncKVClient:
    return AsyncKVClient(address, namespace=NAME, tenant=tenant, tls=Tls(folder / "ca.pem"), api_key=key)


async def test_a_key_is_its_tenant(tmp_path: Path) -> None:
    async with secured(tmp_path) as (store, engines, clients):
        async with client_of(tmp_path, clients, "ann-key") as ann, client_of(tmp_path, clients, "bob-key") as bob:
            assert await ann.put(b"k", b"of ann")
            assert (await ann.get(b"k"), await bob.get(b"k")) == (bytearray(b"of ann"), None)
            assert await bob.put(b"k", b"of bob")
            assert await bob.delete(b"k")
            assert await ann.exists(b"k")
        block = store.service.store.tiers.dram.get(value_key(value_namespace(NAME), "ann", b"k"))
        assert block is not None
        assert block.info.tenant == "ann"
        certified = AsyncKVClient(engines, namespace=NAME, tls=tls(tmp_path, "client", "ann"))
        async with certified as again:
            assert await again.get(b"k") == bytearray(b"of ann")
        for key, tenant, error in (("ann-key", "bob", PermissionDenied), ("wrong", "", Unauthenticated)):
            async with client_of(tmp_path, clients, key, tenant) as stranger:
                with pytest.raises(error):
                    await stranger.get(b"k")


async def test_a_client_reaches_no_keys_but_its_own(tmp_path: Path) -> None:
    """Not those of engines, nor another tenant's, by any call, whatever it says of itself."""
    bobs = value_key(value_namespace(NAME), "bob", b"k")
    async with secured(tmp_path) as (store, engines, _):
        await store.put(KEYS[:1])  # an engine's
        await store.put([bobs], "bob")
        async with client_of(tmp_path, engines, "") as nobody:  # without a certificate, where engines connect
            with pytest.raises(MoonpoolError):
                await nobody.exists(b"k")
        async with Channels(tls(tmp_path, "client", "ann")) as channels:
            as_ann = Rig(store.service, channels, engines)
            for key in (KEYS[0], bobs):
                assert await as_ann.read([key]) == []
                with pytest.raises(MoonpoolError, match="keys of its own tenant only"):
                    await as_ann.put([key])
                for request in (kvstore_pb2.FindRequest(keys=key), kvstore_pb2.RemoveRequest(keys=key)):
                    await refused(as_ann, request)
                damaged = await opened_get(as_ann, keys=key)
                await damaged.write(kvstore_pb2.GetRequest(close=kv_pb2.ReadClose(damaged_key=key)))
                async with asyncio.timeout(60):
                    assert isinstance(await failure(damaged), PermissionDenied)
            with pytest.raises(MoonpoolError, match="tenant that is not the caller's"):
                await as_ann.put([BlockKey(bytes(16) + value_key(b"", "ann", b"x")[16:])], tenant="bob")
            # What a client keeps counts to the client's quota, never to that of pictures.
            rows = BlockFormat(PICTURE_NAMESPACE, LAYOUT)
            with pytest.raises(MoonpoolError, match="engines' own"):
                await as_ann.put([value_key(value_namespace(NAME), "ann", b"k")], block_format=rows)
            with pytest.raises(MoonpoolError, match="engines' own"):
                await as_ann.read([value_key(value_namespace(NAME), "ann", b"k")], block_format=rows)
        assert [len(await store.read([key])) for key in (KEYS[0], bobs)] == [1, 1]
        await store.put(KEYS[1:2], block_format=BlockFormat(PICTURE_NAMESPACE, LAYOUT))
        await store.at_rest()


async def refused(who: Rig, request: kvstore_pb2.FindRequest | kvstore_pb2.RemoveRequest) -> None:
    call = who.stub.Find if isinstance(request, kvstore_pb2.FindRequest) else who.stub.Remove
    with pytest.raises(MoonpoolError, match="keys of its own tenant only"):
        await call(request)
