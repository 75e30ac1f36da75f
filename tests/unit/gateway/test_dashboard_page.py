"""The page's files, and what it may see: of the cluster, and of requests that are one's own or not."""

import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import httpx2
import pytest

from moonpool.base.pictures import limits
from moonpool.base.rpc.api_keys import hash_key
from moonpool.client.testing import FakeConductor
from moonpool.gateway.endpoints.dashboard import MAX_MARKDOWN_CHARS
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import CHAT, TURNS, Answers, answering

FOLDER = Path(str(resources.files("moonpool.gateway"))) / "static"
FILES = sorted(FOLDER.iterdir())


async def test_page_comes_with_a_strict_policy(gateway: Answers) -> None:
    page = await gateway.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("img-src") == "'self' data:", "pictures that the page itself has read"
    assert set(policy.values()) <= {"'self'", "'none'"}
    assert page.headers["x-content-type-options"] == "nosniff"


async def test_all_files_are_served_and_no_others(gateway: Answers) -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for file in FILES:
        answer = await gateway.http.get(f"/page/{file.name}")
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].startswith(kinds[file.suffix[1:]])
    for name in ("nothing.js", "..%2fapp.py", "app.py", "%2e%2e/app.py"):
        assert (await gateway.http.get(f"/page/{name}")).status_code == 404


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_need_nothing_from_elsewhere(file: Path) -> None:
    """No other host is named but the names of XML; every file that is named is there; styles stand in no tag."""
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.|innerHTML|eval\(", text.replace("data:", ""))
    named = re.findall(r'(?:href|src)="(/page/[^"]+)"', text) + re.findall(r'from "\./([^"]+)"', text)
    assert {name.removeprefix("/page/") for name in named} <= {each.name for each in FILES}
    if file.suffix == ".html":
        assert not re.search(r'\s(style|on\w+)="|<style|<script>', text)


def test_parts_that_scripts_use_are_in_the_page() -> None:
    page = (FOLDER / "index.html").read_text()
    scripts = "".join(file.read_text() for file in FILES if file.suffix == ".js")
    named = set(re.findall(r'byId\("([\w-]+)"\)', scripts))
    assert named >= {
        "conversations",
        "new",
        "search",
        "cancel",
        "stop",
        "system",
        "parameters",
        "name",
        "kind",
        "failures",
    }
    assert named <= set(re.findall(r'\sid="([\w-]+)"', page))
    assert f"MAX_CHARS = {MAX_MARKDOWN_CHARS};" in scripts
    assert f"MAX_PICTURES = {limits.MAX_PICTURES};" in scripts
    assert f"MAX_BYTES = {limits.MAX_BYTES >> 20} * MIB;" in scripts
    assert f"MAX_TOGETHER_BYTES = {limits.MAX_TOGETHER_BYTES >> 20} * MIB;" in scripts
    types = [f'"image/{name.lower()}"' for name in limits.FORMATS]
    assert f"TYPES = [{', '.join(types)}];" in scripts


async def html_of(gateway: Answers, text: str) -> str:
    """The HTML that the gateway makes of a text in Markdown."""
    answer = await gateway.http.post("/moonpool/markdown", json={"text": text})
    assert answer.status_code == 200
    html: str = answer.json()["html"]
    return html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# Hi\n\n**b** `c`", "<h1>Hi</h1>\n<p><strong>b</strong> <code>c</code></p>\n"),
        ("```text\n1 < 2\n```", '<pre><code class="language-text">1 &lt; 2\n</code></pre>\n'),
        (
            "```python\n1 < a\n```",
            '<pre><code class="language-python"><span class="mi">1</span> <span class="o">&lt;</span> '
            '<span class="n">a</span>\n</code></pre>\n',
        ),
        ("```klingon\n1 < 2\n```", '<pre><code class="language-klingon">1 &lt; 2\n</code></pre>\n'),
        ("3. a\n4. b", '<ol start="3">\n<li>a</li>\n<li>b</li>\n</ol>\n'),
        ("<https://a.b>", '<p><a href="https://a.b" target="_blank" rel="noopener noreferrer">https://a.b</a></p>\n'),
        ("use <div>", "<p>use &lt;div&gt;</p>\n"),
        (
            "|a|b|\n|--:|---|",
            '<table>\n<thead>\n<tr>\n<th class="right">a</th>\n<th>b</th>\n</tr>\n</thead>\n</table>\n',
        ),
    ],
)
async def test_markdown_becomes_html(gateway: Answers, text: str, html: str) -> None:
    assert await html_of(gateway, text) == html


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        '<a href="https://a.b" onclick="alert(1)">x</a>',
        "<svg/onload=alert(1)>",
        "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](&#106;avascript:alert(1))",
        "[x](vbscript:msgbox)",
        "[x](data:text/html,<script>alert(1)</script>)",
        "[x](data:image/png;base64,AAAA)",
        "[x](/moonpool/state)",
        "![x](data:image/svg+xml;base64,AAAA)",
        "![x](data:image/png;base64,AAAA)",
        "![x](https://a.b/track.png)",
        "[x]: javascript:alert(1)\n\n[x]",
        '[x](https://a.b "\\" onmouseover=alert(1) style=")',
        '```"><script>alert(1)</script>\nx\n```',
        '```x onload=alert(1) class="line"\nx\n```',
        "| a |\n|--:|\n| <b style=x onclick=y>z</b> |",
    ],
)
async def test_html_of_answers_is_safe(gateway: Answers, text: str) -> None:
    """No tag that loads or runs anything, no handler, style or other attribute, no link but to another site."""
    tags = Tags(await html_of(gateway, text))
    assert tags.names <= {"p", "a", "pre", "code", "table", "thead", "tbody", "tr", "th", "td"}
    for name, value in tags.attributes:
        assert name in ("href", "title", "target", "rel", "class")
        assert name != "href" or value.startswith("https://a.b")
        assert name != "class" or re.fullmatch(r"language-\w+|right", value)


class Tags(HTMLParser):
    """The tags of HTML, and their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


DRAWN = "<math><mi>x</mi></math>"
DISPLAYED = '<math display="block"><mi>x</mi></math>'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("so $x$ and \\(x\\)", f"<p>so {DRAWN} and {DRAWN}</p>\n"),
        ("so\n\\[\nx\n\\]\nand", f"<p>so</p>\n{DISPLAYED}<p>and</p>\n"),
        ("so $$x$$", f"<p>so {DISPLAYED}</p>\n"),
        ("> $$\n> x\n> $$", f"<blockquote>\n{DISPLAYED}</blockquote>\n"),
        ("- a\n  \\[ x \\]\n- b", f"<ul>\n<li>a{DISPLAYED}</li>\n<li>b</li>\n</ul>\n"),
        (
            "| a |\n|---|\n| $x$ |",
            f"<table>\n<thead>\n<tr>\n<th>a</th>\n</tr>\n</thead>\n<tbody>\n<tr>\n<td>{DRAWN}</td>",
        ),
        ("$5 and $10, US$5-US$10, $HOME and $PATH", "<p>$5 and $10, US$5-US$10, $HOME and $PATH</p>\n"),
        ("\\$x\\$ `$x$` \\\\(x\\\\)", "<p>$x$ <code>$x$</code> \\(x\\)</p>\n"),
        ("$a\\$$", "<p><math><mi>a</mi><mi>$</mi></math></p>\n"),
        ("$a\\;$", '<p><math><mi>a</mi><mspace width="0.2777778em"></mspace></math></p>\n'),
        (
            "$$\\begin{array}{rl}x&x\\end{array}$$",
            '<math display="block"><mtable displaystyle="false" scriptlevel="0"><mtr>'
            '<mtd class="right"><mi>x</mi></mtd><mtd class="left">',
        ),
        ("$\\frac{1$ \\[ x", "<p>$\\frac{1$ [ x</p>\n"),
        ("$$\nx\n\ny\n$$", "<p>$$\nx</p>\n<p>y\n$$</p>\n"),
        ("```\n$x$\n```", "<pre><code>$x$\n</code></pre>\n"),
    ],
)
async def test_formulas_become_mathml(gateway: Answers, text: str, html: str) -> None:
    """In paragraphs and in lines of their own; prices, code and what is no LaTeX stay text."""
    pytest.importorskip("math_core")
    assert (await html_of(gateway, text)).startswith(html)


@pytest.mark.parametrize(
    "formula",
    [
        r"\text{<img src=x onerror=alert(1)>}",
        r"\text{</math><script>alert(1)</script>}",
        r"\href{javascript:alert(1)}{x}",
        r"\color{red}{x} \class{a}{b} \style{background: url(https://a.b)}{c}",
        r"\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}",
        r"\includegraphics{https://a.b/c.png}",
    ],
)
async def test_formulas_are_safe(gateway: Answers, formula: str) -> None:
    """No style, link or handler; cells have classes for their sides."""
    pytest.importorskip("math_core")
    tags = Tags(await html_of(gateway, f"$${formula}$$"))
    assert tags.names <= {"math", "merror", "mi", "mn", "mo", "mrow", "mtable", "mtd", "mtext", "mtr"}
    assert {(name, value) for name, value in tags.attributes if name in ("class", "style", "href", "src")} <= {
        ("class", "left"),
        ("class", "right"),
    }


async def test_hostile_formulas_end_soon(gateway: Answers) -> None:
    """Nesting, definitions and formulas without an end, as long as a text may be."""
    pytest.importorskip("math_core")
    nested = "$" + "{" * 999 + "}" * 999 + "$ "
    defined = "$\\newcommand{\\a}{" + "b" * 1900 + "}" + "\\a" * 20 + "$ "
    for text in (nested, defined, "$a ", "$$\na\n", "\\[\n", "\\(a "):
        whole = (text * (MAX_MARKDOWN_CHARS // len(text)))[:MAX_MARKDOWN_CHARS]
        assert len(await html_of(gateway, whole)) < 20 * MAX_MARKDOWN_CHARS


async def test_costly_paragraph_stays_text(gateway: Answers) -> None:
    """Of a paragraph alone: others of the same text are rendered while the text's bound lasts."""
    long = "*a* " * 1100
    assert await html_of(gateway, f"{long}\n\n*b*") == f"<p>{long.strip()}</p>\n<p><em>b</em></p>\n"
    less = "*a* " * 700
    paragraphs = (await html_of(gateway, f"{less}\n\n" * 8)).splitlines()
    assert ["<em>" in paragraph for paragraph in paragraphs] == [True] + [False] * 7


@pytest.mark.parametrize("body", [{}, {"text": 1}, {"text": "x" * (MAX_MARKDOWN_CHARS + 1)}])
async def test_wrong_text_is_refused_by_name(gateway: Answers, body: dict[str, object]) -> None:
    answer = await gateway.http.post("/moonpool/markdown", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")


async def test_markdown_needs_a_key_and_uses_no_budget(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{hash_key('ann')} rpm=1 ann\n")
    async with answering(FakeConductor(), api_keys=keys) as gateway:
        assert (await gateway.http.post("/moonpool/markdown", json={"text": "x"})).status_code == 401
        headers = {"authorization": "Bearer ann"}
        for _ in range(3):
            rendered = await gateway.http.post("/moonpool/markdown", json={"text": "x"}, headers=headers)
            assert rendered.json() == {"html": "<p>x</p>\n"}
        chats = [await gateway.http.post(CHAT, json={"messages": TURNS}, headers=headers) for _ in range(2)]
        assert [chat.status_code for chat in chats] == [200, 429]


def cluster() -> FakeConductor:
    """A cluster with a kvstore, and three requests that ended: ann's, bob's, and one without a tenant."""
    fake = FakeConductor()
    store = kv_pb2.Instance(id="kvstore-0", kind=kv_pb2.INSTANCE_KIND_KVSTORE, address="host:1")
    load = pb.LoadReport(tiers=[pb.TierLoad(name="ssd", blocks=3, used_bytes=300, capacity_bytes=1000)])
    fake.state.instances.add(instance=store, load=load)
    for tenant in ("ann", "bob", ""):
        fake.state.recent.last.add(request_id=f"of-{tenant}", tenant=tenant, usage=pb.Usage(prompt_tokens=5))
        line = pb.Timeline(tenant=tenant, timing=pb.Timing(ttft_s=0.5, e2e_s=0.75), usage=pb.Usage(prompt_tokens=5))
        attempt = pb.Attempt(
            placement=pb.Placement(prefill="p"), prompt_tokens=5, tokens=2, first_token_s=0.5, last_token_s=0.75,
            candidates=[pb.CandidateExplanation(instance="p", queue_s=9.0)],
        )  # fmt: skip
        fake.explanations[f"of-{tenant}"] = pb.ExplainResponse(
            placement=attempt.placement, timeline=line, attempts=[attempt]
        )
    return fake


async def seen(http: httpx2.AsyncClient, **headers: str) -> tuple[int, list[str], list[int]]:
    """The status of the state, ids of the listed requests, and statuses of each request and of one that never was."""
    state = await http.get("/moonpool/state", headers=headers)
    listed = await http.get("/moonpool/requests", headers=headers)
    ids = [line["request_id"] for line in listed.json().get("requests", ())]
    each = [
        await http.get(f"/moonpool/requests/{name}", headers=headers) for name in ("of-ann", "of-bob", "of-", "of-none")
    ]
    return state.status_code, ids, [answer.status_code for answer in each]


async def test_without_keys_everybody_sees_all() -> None:
    async with answering(cluster()) as gateway:
        assert await seen(gateway.http) == (200, ["of-ann", "of-bob", "of-"], [200, 200, 200, 404])
        state = await gateway.http.get("/moonpool/state")
        assert state.json()["instances"][0]["tiers"] == [
            {"name": "ssd", "blocks": 3, "used_bytes": 300, "capacity_bytes": 1000}
        ]
        assert state.headers["cache-control"] == "no-store"
        found = (await gateway.http.get("/moonpool/requests/of-ann")).json()
        assert found["timeline"]["timing"]["ttft_s"] == 0.5
        assert [phase["name"] for phase in found["phases"]] == ["prompt", "steps"]
        assert set(found["names"]) >= {"prompt", "steps"}


async def test_with_keys_a_tenant_sees_its_own_and_operators_all(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"sha256:{hash_key(name)} {name}\n" for name in ("ann", "bob", "root")))
    async with answering(cluster(), api_keys=keys, operator_tenants="root, other") as gateway:
        assert (await gateway.http.get("/")).status_code == 200
        assert await seen(gateway.http) == (401, [], [401] * 4)
        assert await seen(gateway.http, authorization="Bearer ann") == (403, ["of-ann"], [200, 404, 404, 404])
        assert await seen(gateway.http, authorization="Bearer root") == (
            200,
            ["of-ann", "of-bob", "of-"],
            [200, 200, 200, 404],
        )
        attempts = [
            (await gateway.http.get("/moonpool/requests/of-ann", headers={"authorization": f"Bearer {name}"})).json()
            for name in ("ann", "root")
        ]
        # The queues of instances show other tenants' requests.
        assert [len(found["attempts"][0]["candidates"]) for found in attempts] == [0, 1]
        told = [
            (await gateway.http.get(f"/moonpool/requests/{name}", headers={"authorization": "Bearer ann"})).text
            for name in ("of-bob", "of-none")
        ]
        assert told[0].replace("of-bob", "ID") == told[1].replace("of-none", "ID")
