"""A report as one self-contained HTML page or one PNG."""

import io
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib

matplotlib.use("Agg")

from jinja2 import Environment
from markupsafe import Markup
from matplotlib import pyplot

from megatron_dsa import __version__
from megatron_dsa.errors import require
from megatron_dsa.extras.report import facts
from megatron_dsa.extras.report.events import RunLog
from megatron_dsa.extras.report.panels import PANELS, Panel, color_of
from megatron_dsa.training.files.whole import whole_file

matplotlib.rcParams["text.parse_math"] = False  # run names may hold dollar signs

#: Placeholder colours that the page replaces in light and dark mode.
_INK, _GRID = "#010203", "#040506"
_LOOK = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
}
_TEMPLATE = Path(__file__).with_name("page.html")


def write_html(runs: list[RunLog], title: str, path: Path) -> None:
    described: list[dict[str, Any]] = [
        {
            "name": run.name,
            "color": color_of(number),
            "attention": facts.attention(run),
            "origin": facts.origin(run),
            "files": _links(facts.files(run), path),
            "results": facts.results(run),
            "calls": facts.calls(run),
            "shares": facts.step_shares(run),
        }
        for number, run in enumerate(runs)
    ]
    columns = [
        name for name in described[0]["results"] if any(run["results"][name] for run in described)
    ]
    origin = [name for name in described[0]["origin"] if any(r["origin"][name] for r in described)]
    models: dict[str, list[str]] = {}
    for run in runs:
        if text := facts.model(run):
            models.setdefault(text, []).append(run.name)
    names = [name for run in described for name in (*run["calls"], *run["shares"])]
    differ, same = facts.arguments(runs)
    page = Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE.read_text("utf-8"))
    text = page.render(
        title=title,
        version=__version__,
        runs=described,
        columns=columns,
        origin=origin,
        models=models,
        charts=[(panel, svg) for panel in PANELS if (svg := draw_svg(panel, runs))],
        missing=facts.missing(runs),
        operations=sorted(dict.fromkeys(names), key=lambda name: name == facts.REST),
        differ=differ,
        same=same,
    )
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def _links(files: dict[str, Path], page: Path) -> dict[str, str]:
    start = page.absolute().parent
    return {name: quote(os.path.relpath(file, start)) for name, file in files.items()}


def draw_svg(panel: Panel, runs: list[RunLog]) -> Markup | None:
    colors = {"text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK}
    colors |= {"xtick.color": _INK, "ytick.color": _INK, "grid.color": _GRID}
    with pyplot.rc_context(_LOOK | colors):
        figure, axis = pyplot.subplots(figsize=(5.0, 3.1), layout="constrained")
        drawn = panel.show(axis, runs)
        buffer = io.StringIO()
        if drawn:
            figure.savefig(
                buffer, format="svg", transparent=True,
                metadata={"Date": None, "Creator": None},
            )  # fmt: skip
        pyplot.close(figure)
    if not drawn:
        return None
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    # SVG ids must be unique in the page.
    mark = re.sub(r"\W+", "-", panel.title.lower())
    return Markup(re.sub(r'(id="|href="#|url\(#)', rf"\1{mark}-", svg))


def write_png(runs: list[RunLog], title: str, path: Path) -> None:
    """Write all charts as one picture.

    Raises:
        ConfigError: there is nothing to draw.
    """
    with pyplot.rc_context(_LOOK | {"grid.color": "#dfe3e8"}):
        probe = pyplot.figure()
        panels = [panel for panel in PANELS if panel.show(probe.add_subplot(), runs)]
        pyplot.close(probe)
        require(
            bool(panels),
            f"--output {path}: the runs logged nothing that is drawn, write a page (.html) of them",
        )
        columns = min(3, len(panels))
        lines = -(-len(panels) // columns)
        figure = pyplot.figure(figsize=(5.2 * columns, 3.1 * lines + 0.5), layout="constrained")
        for number, panel in enumerate(panels, 1):
            axis = figure.add_subplot(lines, columns, number)
            panel.show(axis, runs)
            axis.set_title(panel.title, loc="left", weight="bold")
        figure.suptitle(title, fontsize=13, weight="bold", x=0.01, ha="left")
        try:
            with whole_file(path) as file:
                figure.savefig(file, dpi=100)
        finally:
            pyplot.close(figure)
