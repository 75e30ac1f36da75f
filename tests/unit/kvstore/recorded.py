"""A data folder that a kvstore wrote before layouts had groups: one block, `KEYS[0]` of `rig`, and the index."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

from tests.unit.kvstore.helpers import data_of, keys_of

RECORD_BYTES = 8192
_HEADER = (
    "4d504b56524543321c62a0686f62072b00100000030000000ed32d3352f0cddd88b03a266c387e1a4683d5356ce381463b4b"
    "42cf9ccadfaf00000000000000000000000000000000000000000000000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e"
    "6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e0100000002000000040000001000000000000000666c6f61743332000000"
    "0000000000000000000040aca0addb51690496d2cfed114747da6fbd07ed6cab64a00ec9086b0000000001"
)
_INDEX = (
    "c-rmVyGkQb0D$2$$;25&bK<2Ct6&jq1ThFft(L`R8?m<#GD<KPH;I;kWw+QDShlgTwlFLfR=Zm)f`TZDV50_n0P_Z3W}L}PHZUdx"
    "Oz{7}LoRd9fL4EIaumX*o8!&j``?Q2P|Y#&d_?V?x?`N@p@y&ie|*TZc<p&W000000DyK=+SLDcxA!&K|Gjndg8WGU00000XuE*x"
    "(U>?4tMa2f4F8kgB)=N~0000$r<pSQH6+$k*<|6hlOA5Y%+^FQpWE0lk}c0Svc-JLX!ZQMC>U#*r!|^hz?!d$j8R-^c5cws|3jiG"
    "tMoqr0001h{_pz!x9-E&#FmjSq;lCA)z$x8{|5j7007Yc-PHg7`}En@{X?$)9}*Q=q5A;<0002!IuUc!o$vW8PVHNIJpEsmW%?fg"
    "0001hH#cvN{lcB|gS+{&&zr^ZtdC(`i3CRjQFS6Rt*xeWE5-P<=IQ@^xzGLo00000fR6RP?*C6T_zd9ZVsv?D?$2KMVluu|J-Pl~"
    "o{gmwrLl#tmow?RFAH;@KAdhJ-|ktZZ;2l1>$<1^ujCc|4*&oF0HFUnqW|j`Xte*|s5v@yul&+V1F^!7a}lk5Xz={g>*{~@{{sL3"
    "004Ad|NC!&*W;bt=Kl9TzvexEegFF}pnK-Gw*OzBtN%yDfvm^_${zp#004jvVPD@5I`wX`_w%>^ub<!ke~(VSP|E"
)


def write_folder(folder: Path) -> None:
    """Write the recorded files."""
    (folder / "index").mkdir(parents=True)
    (folder / "index" / "data.mdb").write_bytes(zlib.decompress(base64.b85decode(_INDEX)))
    (folder / "segments").mkdir()
    record = bytes.fromhex(_HEADER).ljust(4096, b"\0") + data_of(keys_of(1)[0])
    (folder / "segments" / "0000000000000001.seg").write_bytes(record.ljust(RECORD_BYTES, b"\0"))
