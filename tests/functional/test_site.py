"""The documentation site, built and opened in headless Chromium.

All links of the built pages are followed. Browser tests need Chromium and ``playwright``.
"""

import functools
import http.server
import os
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.cases.chromium import WIDTHS, opened, windows

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://repository.invalid/megatron-dsa"
#: Pages with the widest tables, code, formulas and charts.
OPENED = (
    *("/", "/pages/", "/performance/", "/evidence/", "/guide/start/", "/guide/flags/"),
    *("/design/architecture/", "/design/maths/", "/kernels/masked_attention/", "/develop/tests/"),
)
#: True once the site's script has made every table scrollable.
READY = "!document.querySelector('article > table, article :not(.md-typeset__table) > table')"


class Page(HTMLParser):
    """Anchors and links of a page."""

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
    with windows() as context:
        yield context


@pytest.fixture(scope="module")
def address(site):
    """Return the site's address on a local server."""
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": print_nothing})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=site)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def print_nothing(*_args):
    """Discard the log of requests."""


def html_pages(site: Path) -> dict[str, Page]:
    """Return the pages of a site by address."""
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
    docs = ROOT / "docs"
    names = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    wanted = {f"/{name}/" for name in (names - {"README"}) | {"pages", "develop/contributing"}}
    start = html_pages(site)["/"]
    linked = {urlsplit(urljoin("http://site/", x)).path for x in start.addresses}
    assert wanted | {"/changes/"} <= linked


@pytest.mark.parametrize("width", WIDTHS)
def test_site_in_a_browser(width, address, browser):
    found = {}
    for path in OPENED:
        page, defects = opened(browser, urljoin(address, path), width, READY)
        if defects:
            found[path] = defects
        page.close()
    assert not found


def test_search(address, browser):
    page, defects = opened(browser, address, 1280, READY)
    page.get_by_role("textbox", name="Search").press_sequentially("zigzag")
    page.locator(".md-search-result__link").first.wait_for(timeout=20000)
    assert page.locator(".md-search-result__link", has_text="Parallelism").count()
    assert not defects
