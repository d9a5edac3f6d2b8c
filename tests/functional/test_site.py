"""The documentation site and a report page, built and opened in headless Chromium.

``mkdocs build --strict`` refuses broken links between pages; here all links of the built pages are
followed once more, read from their HTML. Browser tests need Chromium and ``playwright``.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.functional.launch import launch, train

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://repository.invalid/megatron-dsa"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
WIDTHS = (390, 1280)
#: Pages with the widest tables, code, formulas and charts.
OPENED = (
    *("/", "/pages/", "/performance/", "/evidence/", "/guide/start/", "/guide/flags/"),
    *("/design/architecture/", "/design/maths/", "/kernels/masked_attention/", "/develop/tests/"),
)
#: Elements wider than the window, but for content of an element that scrolls or clips.
STICKING_OUT = """() => {
  const width = document.documentElement.clientWidth;
  const style = (x) => getComputedStyle(x);
  const contained = (x) => x && (style(x).overflowX != "visible" || contained(x.parentElement));
  const box = (x) => x.getBoundingClientRect();
  return [...document.querySelectorAll("body *")]
    .filter((x) => box(x).width > 0 && box(x).right > width + 1)
    .filter((x) => !contained(x.parentElement) && style(x).position != "fixed")
    .map((x) => x.outerHTML.slice(0, 120));
}"""


#: True once the site's script has put every table into an element that scrolls.
READY = "!document.querySelector('article > table, article :not(.md-typeset__table) > table')"


class Page(HTMLParser):
    """Anchors of a page, and the addresses that it links to or loads."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("id", "name"):
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.addresses.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("material", reason="needs docs/requirements.txt")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"REPOSITORY_URL": REPOSITORY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium's windows, with one cache."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs Chromium: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=program, args=QUIET)
        yield chromium.new_context()
        chromium.close()


@pytest.fixture(scope="module")
def address(site):
    """Address of the site on a server of this process."""
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": print_nothing})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=site)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def print_nothing(*_args):
    """Stand in for the log of requests."""


def html_pages(site: Path) -> dict[str, Page]:
    """Return the pages of a site by their address."""
    return {
        f"/{path.relative_to(site).as_posix().removesuffix('index.html')}": Page(
            path.read_text(encoding="utf-8")
        )
        for path in site.rglob("*.html")
    }


def test_every_link_leads_somewhere(site):
    pages = html_pages(site)
    of_repository = 0
    for here, page in pages.items():
        for address in page.addresses:
            link = urlsplit(urljoin(f"http://site{here}", address))
            path = unquote(link.path)
            if address.startswith(REPOSITORY):
                _, kind, branch, name = path.removeprefix("/megatron-dsa").split("/", 3)
                target = ROOT / name
                assert branch == "main" and target.exists(), f"{here}: {address}"
                assert kind == ("tree" if target.is_dir() else "blob"), f"{here}: {address}"
                of_repository += 1
            elif link.netloc == "site":
                known = path in pages or (site / path[1:]).is_file()
                assert known, f"{here}: {address}"
                if link.fragment and path in pages:
                    anchor = unquote(link.fragment)
                    assert anchor in {*pages[path].anchors, "__top"}, f"{here}: {address}"
    assert of_repository > 50


def test_every_page_is_on_the_site(site):
    """In the navigation of each other page, the pages outside ``docs/`` included."""
    docs = ROOT / "docs"
    names = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    wanted = {f"/{name}/" for name in (names - {"README"}) | {"pages", "develop/contributing"}}
    start = html_pages(site)["/"]
    linked = {urlsplit(urljoin("http://site/", x)).path for x in start.addresses}
    assert wanted | {"/changes/"} <= linked


def opened(window, address: str, width: int) -> tuple[object, list[str]]:
    """Open a page; return it and a list of its defects, which later events extend."""
    page = window.new_page()
    page.set_viewport_size({"width": width, "height": 844})
    wrong: list[str] = []
    page.on("console", lambda x: wrong.append(x.text) if x.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    page.on("response", lambda x: wrong.append(f"{x.status}: {x.url}") if x.status >= 400 else None)
    page.goto(address)
    page.wait_for_function(READY)
    if page.evaluate("document.documentElement.scrollWidth") > width:
        wrong.append(f"scrolls sideways at {width} px")
    wrong += page.evaluate(STICKING_OUT)
    return page, wrong


@pytest.mark.parametrize("width", WIDTHS)
def test_site_in_a_browser(width, address, browser):
    found = {}
    for path in OPENED:
        page, wrong = opened(browser, urljoin(address, path), width)
        if wrong:
            found[path] = wrong
        page.close()
    assert not found


def test_search(address, browser):
    page, wrong = opened(browser, address, 1280)
    page.get_by_role("textbox", name="Search").press_sequentially("zigzag")
    page.locator(".md-search-result__link").first.wait_for(timeout=20000)
    assert page.locator(".md-search-result__link", has_text="Parallelism").count()
    assert not wrong


@pytest.fixture(scope="module")
def report(data, tmp_path_factory):
    """Page of a run of three steps."""
    folder = tmp_path_factory.mktemp("report")
    logged = ("--log-timers-to-tensorboard", "--log-throughput", "--dsa-time-operations")
    flags = {"--data-path": data, "--train-iters": 3, "--tensorboard-dir": folder / "run"}
    train(flags | dict.fromkeys(logged, True))
    command = {"report": str(folder / "run"), "--output": folder / "report.html"}
    launch(command, module="megatron_dsa")
    return folder / "report.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_report_in_a_browser(width, report, browser):
    page, wrong = opened(browser, report.as_uri(), width)
    page.evaluate("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
    wrong += page.evaluate(STICKING_OUT)
    assert page.locator("svg").count() >= 3
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not wrong
