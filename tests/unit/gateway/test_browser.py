"""The page in a real browser, where there is one: what its scripts make of it."""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.errors import Overloaded
from moonpool.base.pictures.limits import MAX_BYTES
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.client.transport import GenerateCall
from moonpool.v1 import conductor_pb2 as pb
from tests.pictures import picture_file, picture_model
from tests.unit.gateway.test_client_disconnect import HeldCall
from tests.unit.gateway.test_dashboard_page import cluster
from tests.unit.gateway.test_http_server import serving

from .fakes import ready

playwright = pytest.importorskip("playwright.async_api")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)}")]
WAIT_MS = 30_000
AXE = Path(__file__).parents[3] / ".clients" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
INSTALL_AXE = "npm install --prefix .clients/axe axe-core@4.14.1"
MARKDOWN = "# Head\n\n```python\nprint(1)\n```\n\n[x](javascript:alert(1)) <img src=x onerror=alert(1)>"


@asynccontextmanager
async def opened(port: int) -> AsyncIterator[Any]:
    """The page in a browser. At the end, no script has failed, and nothing was blocked by the policy."""
    wrong: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        context = await browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = await context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("console", lambda line: wrong.append(line.text) if "Security Policy" in line.text else None)
        await page.goto(f"http://127.0.0.1:{port}/")
        yield page
        await browser.close()
    assert wrong == []


def says(text: str) -> list[pb.GenerateResponse]:
    """The messages of an answer of four tokens, whose first has the whole text."""
    messages = answer((1, 2, 3, 4), prompt_tokens=9, cached_tokens=4)
    for message in messages[1:-1]:
        message.delta.text = ""
    messages[1].delta.text = text
    return messages


class Calls:
    """A transport whose calls are given; the rest is the fake conductor's."""

    def __init__(self, fake: FakeConductor, calls: Iterator[Script | HeldCall]) -> None:
        self._fake = fake
        self._calls = calls
        self.requests: list[pb.GenerateRequest] = []

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> GenerateCall:
        self.requests.append(request)
        call = next(self._calls)
        return call if isinstance(call, HeldCall) else FakeConductor(lambda _: call).begin(request, timeout_s)

    async def query(self, request: Message, timeout_s: float) -> Any:
        return self._fake.answer(request)

    async def aclose(self) -> None:
        """Nothing is open."""


class PausedCall(HeldCall):
    """Waits for `resumed` behind so many messages, and for ever behind the last."""

    def __init__(self, messages: Iterable[pb.GenerateResponse], pause: int) -> None:
        super().__init__(messages)
        self._before_pause = pause
        self.resumed = asyncio.Event()

    async def __anext__(self) -> pb.GenerateResponse:
        if not self._before_pause:
            await self.resumed.wait()
        self._before_pause -= 1
        return await super().__anext__()


async def test_conversation() -> None:
    """Markdown, a stopped answer, a reload, an edit that is refused, and the same turn again."""
    held = HeldCall(answer((1, 2, 3), prompt_tokens=9)[:3])
    refused = Overloaded("the queue is full", reason="queue_full", retry_after_s=1.0)
    fake = ready(cluster())
    usage = pb.Usage(prompt_tokens=9, cached_tokens=8)
    placement = pb.Placement(prefill="prefill-1", decode="decode-1")
    fake.explanations["fake"] = pb.ExplainResponse(timeline=pb.Timeline(usage=usage), placement=placement)
    calls = Calls(fake, iter([says(MARKDOWN), held, [refused], says("again")]))
    async with serving(AsyncClient(transport=calls)) as (_, port), opened(port) as page:
        turns = page.locator("#talk > article")
        await page.locator("summary", has_text="System prompt").click()
        await page.fill("#system", "Be brief.")
        await page.fill("#temperature", "0.5")
        await page.fill("#seed", "7")
        await page.fill("#text", "hi")
        await page.press("#text", "Enter")
        rendered = turns.nth(1).locator(".rendered")
        await turns.nth(1).locator(".note a").wait_for()
        assert await rendered.locator("h1").text_content() == "Head"
        assert await rendered.locator("pre > code.language-python").text_content() == "print(1)\n"
        assert await rendered.locator("img, a").count() == 0
        await rendered.locator("button", has_text="Copy code").click()
        await rendered.locator("button", has_text="Copied").wait_for()
        assert await page.evaluate("navigator.clipboard.readText()") == "print(1)\n"
        await turns.nth(1).get_by_role("button", name="Copy", exact=True).click()
        await turns.nth(1).get_by_role("button", name="Copied", exact=True).nth(1).wait_for()
        assert await page.evaluate("navigator.clipboard.readText()") == MARKDOWN
        note = await turns.nth(1).locator(".note").text_content()
        assert note.startswith("stop · 4 of 9 prompt tokens from the cache · TTFT ")
        assert "TPOT" in note

        await page.fill("#text", "more")
        await page.press("#text", "Enter")
        await turns.nth(3).locator(".said", has_text="1 2").wait_for()
        await page.keyboard.press("Escape")
        await asyncio.wait_for(held.ended.wait(), WAIT_MS / 1000)
        stopped = await turns.nth(3).locator(".note").text_content()
        assert stopped.startswith("stopped · 8 of 9 prompt tokens from the cache · TTFT ")
        assert "prefill-1 → decode-1" in stopped
        assert "2 tokens" in stopped

        await page.reload()
        assert await rendered.locator("h1").text_content() == "Head"
        assert await turns.nth(3).locator(".note").text_content() == stopped
        assert await page.input_value("#system") == "Be brief."

        await turns.nth(2).locator("button", has_text="Edit").click()
        assert await page.input_value("#text") == "more"
        await page.fill("#text", "less")
        await page.press("#text", "Enter")
        problem = await turns.nth(3).locator(".problem").text_content()
        assert problem.startswith("HTTP 429, queue_full: the queue is full")
        assert await turns.nth(2).locator(".said").text_content() == "less"

        await turns.nth(3).locator("button", has_text="Regenerate").click()
        await turns.nth(3).locator(".note a").wait_for()
        assert (await turns.nth(3).locator(".rendered").text_content()).strip() == "again"
        assert await turns.count() == 4
        asked = calls.requests[-1]
        assert [message.content for message in asked.chat.messages] == ["Be brief.", "hi", MARKDOWN, "less"]
        assert (asked.sampling.temperature, asked.sampling.seed, asked.sampling.max_tokens) == (0.5, 7, 512)

        await page.click("#new")
        assert await turns.count() == 0
        await page.locator("summary", has_text="System prompt").click()
        await page.fill("#temperature", "9")
        await page.fill("#text", "too hot")
        await page.press("#text", "Enter")
        assert (await page.locator("#ask-problem").text_content()).startswith("temperature: ")
        assert await turns.count() == 0, "nothing is sent with a parameter that is out of bounds"
        await page.fill("#text", "")
        listed = page.locator("#conversations .name")
        await listed.get_by_text("hi").click()
        assert await turns.count() == 4
        await page.get_by_role("button", name="Delete hi").click()
        assert await listed.count() == 0
        await page.locator("#toast button", has_text="Undo").click()
        assert await listed.all_text_contents() == ["hi"]


GROWING = """Let $x^2 = 4$ be given, **so** it is

\\[ x = \\begin{cases} 2 & \\text{if } x > 0 \\\\ -2 & \\text{else} \\end{cases} \\]

| a | b |
|---|---|
| 1 | 2 |

```python
print(1"""


async def test_answers_are_rendered_while_they_come() -> None:
    """Formulas, tables and code of an answer that has not ended, also in the last paragraph; a stop keeps them."""
    pytest.importorskip("math_core")
    messages = says(GROWING)
    held = HeldCall(messages[:2])
    fake = ready(cluster())
    fake.explanations["fake"] = pb.ExplainResponse(placement=pb.Placement(prefill="prefill-1", decode="decode-1"))
    calls = Calls(fake, iter([held]))
    async with serving(AsyncClient(transport=calls)) as (_, port), opened(port) as page:
        await page.fill("#text", "hi")
        await page.press("#text", "Enter")
        said = page.locator("#talk > article").nth(1).locator(".said")
        await said.locator("pre > code span", has_text="print").wait_for()
        assert not held.ended.is_set()
        note = await page.locator("#talk > article").nth(1).locator(".note").text_content()
        assert note.startswith("9 prompt tokens · TTFT ")
        assert await said.locator("p > strong").text_content() == "so"
        assert await said.locator("p > math > msup").text_content() == "x2"
        assert await said.locator(".formula > math mtable mtr").count() == 2
        assert await said.locator("tbody td").all_text_contents() == ["1", "2"]
        box = await said.locator("math mtable").bounding_box()
        assert box["height"] > 30, "the browser draws two lines of cases"
        await page.click("#stop")
        await page.locator("#talk > article").nth(1).locator(".note", has_text="stopped").wait_for()
        assert await said.locator(".formula > math").count() == 1


def talk(turns: int, code: str) -> str:
    """A stored conversation of that many turns."""
    said = [{"role": ("user", "assistant")[at % 2], "content": f"turn {at}"} for at in range(turns)]
    said[-1]["content"] = f"```python\n{code}\n```\n\n| a | b |\n|---|---|\n| {code} | x |"
    return json.dumps({"id": "long", "settings": {}, "turns": said, "changed": 1, "revision": "r"})


async def test_long_conversations_and_wide_code_stay_in_the_window() -> None:
    """200 turns open at their end; code and tables scroll in themselves, also on a phone."""
    async with serving(ready(cluster()).async_client()) as (_, port), opened(port) as page:
        stored = talk(200, "x = '" + "wide " * 400 + "'")
        await page.evaluate("text => localStorage.setItem('moonpool-conversation:long', text)", stored)
        await page.reload()
        await page.locator("#conversations .name").click()
        last = page.locator("#talk > article").nth(199)
        await last.locator(".code code span").first.wait_for()
        assert await page.locator("#talk > article").count() == 200
        assert await page.locator("#talk .rendered").count() < 50, "only what is near the window is rendered"
        for width in (1280, 390):
            await page.set_viewport_size({"width": width, "height": 800})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.evaluate("document.querySelector('#scroll').scrollWidth") <= width
        await page.evaluate("document.querySelector('#scroll').scrollTop = 0")
        await page.click("#newest")
        assert (
            await page.evaluate(
                "(box => box.scrollHeight - box.scrollTop - box.clientHeight)(document.querySelector('#scroll'))"
            )
            < 2
        )


async def test_two_tabs_keep_both_turns() -> None:
    """What one tab says is shown in the other; what both say at once is kept as two conversations."""
    calls = Calls(ready(cluster()), iter([says("one"), says("two"), says("three"), says("four")]))
    async with serving(AsyncClient(transport=calls)) as (_, port), opened(port) as page:
        await say(page, "hi")
        other = await page.context.new_page()
        await other.goto(f"http://127.0.0.1:{port}/")
        await other.locator("#conversations .name").click()
        await say(other, "more")
        await page.locator("#talk > article").nth(3).wait_for()

        await other.close()

        # Both speak at once: storage events come to other tabs only, so this one does not hear of the turn.
        await page.evaluate(
            """() => {
              const [key] = Object.keys(localStorage);
              const talk = JSON.parse(localStorage.getItem(key));
              talk.turns.push({ role: "user", content: "from the other tab" });
              localStorage.setItem(key, JSON.stringify({ ...talk, revision: "other" }));
            }"""
        )
        await say(page, "from here")
        kept = [json.loads(each) for each in await page.evaluate("Object.values(localStorage)")]
        last = sorted([turn["content"] for turn in talk["turns"] if turn["role"] == "user"][-1] for talk in kept)
        assert last == ["from here", "from the other tab"]
        assert sorted(await page.locator("#conversations .name").all_text_contents()) == ["hi", "hi (other tab)"]


async def say(page: Any, text: str) -> None:
    """Send a turn and wait for its whole answer."""
    turns = await page.locator("#talk > article").count()
    await page.fill("#text", text)
    await page.press("#text", "Enter")
    await page.locator("#talk > article").nth(turns + 1).locator(".note a").wait_for()


FILES = """([kind, target, files]) => {
  const given = new DataTransfer();
  for (const [name, type, chars] of files) {
    const bytes = Uint8Array.from(atob(chars), (char) => char.charCodeAt(0));
    given.items.add(new File([bytes], name, { type }));
  }
  const options = { bubbles: true, cancelable: true };
  return document.querySelector(target).dispatchEvent(kind === "paste"
    ? new ClipboardEvent(kind, { clipboardData: given, ...options })
    : new DragEvent(kind, { dataTransfer: given, ...options }));
}"""


async def give(
    page: Any, kind: str, name: str, content: bytes, media_type: str = "image/png", at: str = "#text"
) -> None:
    """Drag, drop or paste a file; the browser would leave the page for a file that the page does not take."""
    given = [[name, media_type, base64.b64encode(content).decode()]]
    assert not await page.evaluate(FILES, [kind, at, given]), "the page has not taken the file"


async def test_pictures_of_a_turn(tmp_path: Path) -> None:
    """Chosen, pasted, dropped, removed, sent in order and kept; what is no picture, too large to keep, or refused."""
    pytest.importorskip("PIL")
    red, blue = picture_file(30, 20), picture_file(40, 20)
    calls = Calls(ready(cluster()), iter([says("a cat")]))
    model = picture_model(tmp_path / "tiny-smolvlm")
    texts = Tokenizer.load(model)
    async with serving(AsyncClient(transport=calls), texts, model=str(model)) as (_, port), opened(port) as page:
        waiting, turns = page.locator("#attached img"), page.locator("#talk > article")
        async with page.expect_file_chooser() as chooser:
            await page.get_by_role("button", name="Add files").press("Enter")
        await (await chooser.value).set_files([{"name": "red.png", "mimeType": "image/png", "buffer": red}])
        await page.get_by_role("img", name="red.png").wait_for()
        await give(page, "paste", "gone.png", blue)
        await give(page, "drop", "blue.png", blue)
        await page.get_by_role("img", name="blue.png").wait_for()
        await page.get_by_role("button", name="Remove gone.png").click()
        assert await waiting.count() == 2
        for name, kind, content, told in (
            ("a.tiff", "image/tiff", b"hi", "a.tiff: only PNG, JPEG, WebP and GIF are pictures here."),
            ("huge.png", "image/png", bytes(MAX_BYTES + 1), "huge.png has 4.0 MiB; a picture may have 4.0 MiB."),
        ):
            await give(page, "drop", name, content, kind)
            await page.locator("#ask-problem", has_text=told).wait_for()
        assert await waiting.count() == 2
        await say(page, "What is it?")
        assert await waiting.count() == 0
        parts = calls.requests[-1].chat.messages[-1].parts
        assert [part.picture.content or part.text for part in parts] == [red, blue, "What is it?"]
        await page.set_viewport_size({"width": 390, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await page.reload()
        shown = turns.nth(0).get_by_role("img")
        assert [await shown.nth(at).get_attribute("alt") for at in (0, 1)] == ["red.png", "blue.png"]
        assert await shown.nth(0).evaluate("image => image.decode().then(() => image.naturalWidth)") == 30

        # A file that is no picture whatever its name says: the gateway's own words, and too large to keep.
        await give(page, "drop", "noise.png", bytes(1 << 20))
        await page.get_by_role("img", name="noise.png").wait_for()
        await page.wait_for_function(
            "(box => box.scrollHeight - box.scrollTop - box.clientHeight < 2)(document.querySelector('#scroll'))"
        )  # the end stays in view while the composer grows
        await page.press("#text", "Enter")
        problem = await turns.nth(3).locator(".problem").text_content()
        assert problem.startswith("HTTP 400")
        assert "messages.2.content.0.image_url.url: the picture is none of PNG" in problem
        assert "Too large to keep: noise.png" in await turns.nth(2).text_content()
        assert len(calls.requests) == 1
        await page.reload()
        assert "noise.png was not kept" in await turns.nth(2).text_content()
        assert await shown.count() == 2


async def test_pictures_make_room_for_conversations() -> None:
    """The oldest conversation's pictures go first, and no conversation with them. Other models take none."""
    async with serving(ready(cluster()).async_client()) as (_, port), opened(port) as page:
        await page.locator("#model option", has_text="tiny").wait_for(state="attached")
        await give(page, "drop", "a.png", b"x")
        await page.locator("#ask-problem", has_text="a.png: the served model takes no pictures.").wait_for()
        kept = await page.evaluate(
            """async () => {
              const { save, saved } = await import("/page/conversations.js");
              const url = `data:image/png;base64,${"A".repeat(900000)}`;
              const told = [];
              for (let at = 0; at < 7; at++) {
                Date.now = () => at;
                const pictures = [{ name: "a", url, kept: true }];
                told.push(save({ id: `${at}`, turns: [{ role: "user", content: "hi", pictures }] }));
              }
              const has = ({ id, turns }) => [id, Boolean(turns[0].pictures[0].url)];
              return [told, Object.fromEntries(saved().map(has))];
            }"""
        )
        assert kept == [[True] * 7, {"0": False, "1": False} | {str(at): True for at in range(2, 7)}]


async def test_files_of_text() -> None:
    """Chosen, dropped anywhere, pasted, removed, edited, kept, sent before the question; what is no text is refused."""
    calls = Calls(ready(cluster()), iter([says("read"), says("again")]))
    async with serving(AsyncClient(transport=calls)) as (_, port), opened(port) as page:
        names, turns = page.locator("#attached .file-name"), page.locator("#talk > article")
        async with page.expect_file_chooser() as chooser:
            await page.get_by_role("button", name="Add files").press("Enter")
        text = "naïve ``` code\r\n"
        for_model = "File a.md:\n````\nnaïve ``` code\n````"
        await (await chooser.value).set_files([{"name": "a.md", "mimeType": "", "buffer": text.encode()}])
        await names.get_by_text("a.md").wait_for()
        await give(page, "paste", "gone.py", b"print(1)", "text/x-python", at="body")
        await page.goto(f"http://127.0.0.1:{port}/#cluster")
        await give(page, "dragover", "b.csv", b"", "text/csv", at="#side")
        assert await page.locator("#drop").is_visible()
        await give(page, "drop", "b.csv", "größe;1".encode("cp1252"), "text/csv", at="#side")
        assert not await page.locator("#drop").is_visible()
        await names.get_by_text("b.csv").wait_for()
        await page.get_by_role("button", name="Remove gone.py").click()
        assert await names.all_text_contents() == ["a.md", "b.csv"]
        for name, content, told in (
            ("a.pdf", b"%PDF-1.7\n", "a.pdf is no text"),
            ("a.bin", b"\x7fELF\0", "a.bin is no text"),
            ("big.txt", b"a" * (2**18 + 1), "big.txt has 256 KiB; a file of text may have 256 KiB."),
        ):
            await give(page, "drop", name, content, "")
            await page.locator("#ask-problem", has_text=told).wait_for()
        await say(page, "What is it?")
        assert (
            calls.requests[-1].chat.messages[-1].content
            == f"{for_model}\n\nFile b.csv:\n```\ngröße;1\n```\n\nWhat is it?"
        )
        assert await names.count() == 0

        await page.reload()
        shown = turns.nth(0).locator(".file")
        await shown.first.locator("summary").click()
        assert await shown.first.locator("pre").text_content() == "naïve ``` code\n"
        assert await turns.nth(0).locator(".said").text_content() == "What is it?"
        await page.set_viewport_size({"width": 390, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await turns.nth(0).hover()
        await turns.nth(0).locator("button", has_text="Edit").click()
        await page.get_by_role("button", name="Remove b.csv").click()
        await page.fill("#text", "")
        await page.press("#text", "Enter")
        await turns.nth(1).locator(".note a").wait_for()
        assert calls.requests[-1].chat.messages[-1].content == for_model


async def test_a_mark_for_what_is_dragged_goes_when_it_leaves() -> None:
    """Browsers tell of a file that is dragged for as long as the file is above the page; text is dragged as ever."""
    async with serving(ready(cluster()).async_client()) as (_, port), opened(port) as page:
        await give(page, "dragover", "a.txt", b"", "text/plain", at="#views")
        await page.locator("#drop").wait_for()
        await page.locator("#drop").wait_for(state="hidden")
        assert await page.evaluate(FILES, ["dragover", "#views", []]), "the browser's own affair"
        assert not await page.locator("#drop").is_visible()


async def test_a_selection_stays_while_an_answer_grows() -> None:
    """What was selected in an answer is selected still when more of the answer has come, and at its end."""
    messages = says("One **two** three.\n\n```python\nprint(1)\n```\n\nFour")
    messages[2].delta.text = " five\n\n# Six\n"
    held = PausedCall(messages[:3], pause=2)
    async with serving(AsyncClient(transport=Calls(ready(cluster()), iter([held])))) as (_, port), opened(port) as page:
        await page.fill("#text", "hi")
        await page.press("#text", "Enter")
        said = page.locator("#talk > article").nth(1).locator(".said")
        await said.locator("p", has_text="Four").wait_for()
        await page.evaluate(
            """() => {
              const [first, last] = document.querySelectorAll(".said p");
              getSelection().setBaseAndExtent(first.querySelector("strong").firstChild, 1, last.firstChild, 2);
            }"""
        )
        selected = "getSelection().toString().replace(/\\s+/g, ' ')"
        before = await page.evaluate(selected)
        assert before.startswith("wo three.")
        assert before.endswith("Fo")
        held.resumed.set()
        await said.locator("h1", has_text="Six").wait_for()
        assert await page.evaluate(selected) == before
        await page.click("#stop")
        await page.locator("#talk > article").nth(1).locator(".note", has_text="stopped").wait_for()
        assert await page.evaluate(selected) == before


async def test_cluster_and_requests() -> None:
    fake = ready(cluster())
    fake.state.recent.last.add(request_id="of-eve", refused="queue_full")
    fake.state.recent.last.add(request_id="of-sue", failed="the engine died")
    fake.explanations["of-sue"] = pb.ExplainResponse(failed="the engine died")
    fake.state.recent.last.add(request_id="of-max", cancelled=True)
    fake.explanations["of-max"] = pb.ExplainResponse(cancelled=True)
    async with serving(fake.async_client()) as (_, port), opened(port) as page:
        await page.locator("#model option", has_text="tiny").wait_for(state="attached")
        await page.goto(f"http://127.0.0.1:{port}/nothing")
        await page.goto(f"http://127.0.0.1:{port}/#cluster")
        assert "SSD: 3 blocks, 300 B of 1000 B" in await page.locator("#map article").text_content()
        await page.goto(f"http://127.0.0.1:{port}/#requests/of-ann")
        assert "Request of-ann" in await page.locator("#story h2").first.text_content()
        assert "decode generates the answer" in await page.locator("#story").text_content()
        assert (await page.locator("#failures tbody").text_content()).startswith("404unknown_url")
        found = page.locator("#lately tbody a")
        await found.nth(5).wait_for()
        await page.fill("#name", "queue")
        assert await found.all_text_contents() == ["of-eve"]
        await page.fill("#name", "")
        await page.select_option("#kind", "answered")
        assert await found.all_text_contents() == ["of-ann", "of-bob", "of-"]
        await page.select_option("#kind", "failed")
        await found.first.click()
        await page.locator("#story", has_text="before it was placed: the engine died").wait_for()
        await page.select_option("#kind", "cancelled")
        await found.first.click()
        await page.locator("#story", has_text="Cancelled before it was placed").wait_for()


async def findings(page: Any) -> list[str]:
    """What axe finds wrong with the page as it is: the rule, and where."""
    await page.evaluate(AXE.read_text(encoding="utf-8"))
    found = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{each['id']}: {node['target']} {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


@pytest.mark.skipif(not AXE.exists(), reason=f"no axe; {INSTALL_AXE}")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_has_no_finding(scheme: str) -> None:
    """Names, contrasts, roles and order of all views, with an answer, and on a phone."""
    calls = Calls(ready(cluster()), iter([says(MARKDOWN)]))
    wrong: dict[str, list[str]] = {}
    async with serving(AsyncClient(transport=calls)) as (_, port), opened(port) as page:
        await page.emulate_media(color_scheme=scheme)
        wrong["empty"] = await findings(page)
        await say(page, "hi")
        wrong["answer"] = await findings(page)
        for view in ("see", "cluster", "requests", "requests/of-ann"):
            await page.goto(f"http://127.0.0.1:{port}/#{view}")
            await page.locator(f"nav a[href='#{view.partition('/')[0]}'][aria-current]").wait_for()
            wrong[view] = await findings(page)
        await page.set_viewport_size({"width": 390, "height": 800})
        wrong["phone"] = await findings(page)
    assert {view: found for view, found in wrong.items() if found} == {}
