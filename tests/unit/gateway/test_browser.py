"""The page in a real browser, where there is one: what its scripts make of it."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.unit.gateway.test_dashboard_page import cluster
from tests.unit.gateway.test_http_server import serving

from .fakes import ready

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)}")]


async def shown(port: int, view: str, profile: Path) -> str:
    """The page's document after its scripts have run, as the browser has it."""
    assert BROWSER is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    url = f"http://127.0.0.1:{port}/{view}"
    browser = await asyncio.create_subprocess_exec(
        BROWSER, *flags, "--virtual-time-budget=5000", "--dump-dom", url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(browser.communicate(), 60)
    return out.decode()


async def test_views(tmp_path: Path) -> None:
    fake = ready(cluster())
    async with serving(fake.async_client()) as (_, port):
        chat = await shown(port, "", tmp_path / "profile")
        assert '<span id="model">tiny</span>' in chat
        assert '<section id="chat" aria-label="Playground">' in chat
        state = await shown(port, "#cluster", tmp_path / "profile")
        assert "kvstore-0" in state
        assert "SSD: 3 blocks, 300 B of 1000 B" in state
        request = await shown(port, "#requests/of-ann", tmp_path / "profile")
        assert "Request of-ann" in request
        assert "decode generates the answer" in request
        assert '<section id="cluster" aria-label="Cluster" hidden' in request
