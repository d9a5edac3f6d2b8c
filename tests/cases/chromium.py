"""Pages in headless Chromium: errors, and elements wider than the window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: In pixels: a phone and a desktop.
WIDTHS = (390, 1280)
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
#: Elements wider than the window, except inside a scrolling or clipping element.
_STICKING_OUT = """() => {
  const width = document.documentElement.clientWidth;
  const style = (x) => getComputedStyle(x);
  const contained = (x) => x && (style(x).overflowX != "visible" || contained(x.parentElement));
  const box = (x) => x.getBoundingClientRect();
  return [...document.querySelectorAll("body *")]
    .filter((x) => box(x).width > 0 && box(x).right > width + 1)
    .filter((x) => !contained(x.parentElement) && style(x).position != "fixed")
    .map((x) => x.outerHTML.slice(0, 120));
}"""
_OPEN_DETAILS = "document.querySelectorAll('details').forEach((x) => { x.open = true; })"


@contextmanager
def windows() -> Iterator:
    """Start Chromium with a fresh profile; skip the test without it or playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"needs Chromium: none of {', '.join(PROGRAMS)} is installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=program, args=_FLAGS)
        yield chromium.new_context()
        chromium.close()


def opened(context, address: str, width: int, ready: str = "true") -> tuple:
    """Open a page in a window of ``width`` pixels, with its ``<details>`` open.

    Args:
        ready: JavaScript that becomes true when the scripts of the page have run.

    Returns:
        The page, and a list of defects that later events extend: console messages, failed requests,
            elements wider than the window.
    """
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": 844})
    defects: list[str] = []
    page.on("console", lambda x: defects.append(x.text) if x.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: defects.append(str(error)))
    page.on("requestfailed", lambda request: defects.append(f"failed: {request.url}"))
    page.on(
        "response", lambda x: defects.append(f"{x.status}: {x.url}") if x.status > 399 else None
    )
    page.goto(address)
    page.wait_for_function(ready)
    page.evaluate(_OPEN_DETAILS)
    if page.evaluate("document.documentElement.scrollWidth") > width:
        defects.append(f"scrolls sideways at {width} px")
    defects += page.evaluate(_STICKING_OUT)
    return page, defects
