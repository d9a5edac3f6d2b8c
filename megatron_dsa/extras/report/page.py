"""A report as one HTML page that needs nothing else, or as one picture."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from jinja2 import Environment
from markupsafe import Markup
from matplotlib import pyplot

from megatron_dsa import __version__
from megatron_dsa.errors import require
from megatron_dsa.extras.report import facts
from megatron_dsa.extras.report.events import RunLog
from megatron_dsa.extras.report.lines import color_of
from megatron_dsa.extras.report.panels import PANELS, Panel
from megatron_dsa.training.files.whole import whole_file

matplotlib.rcParams["text.parse_math"] = False  # names of runs may hold dollar signs

#: Stands for the colour of text and axes, which the page sets for light and dark ground.
INK = "#010203"
GRID = "#040506"
LOOK = {
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

TEMPLATE = Path(__file__).with_name("page.html")


def write_html(runs: list[RunLog], title: str, path: Path) -> None:
    """Write the page: charts as vector graphics inside it, no scripts, nothing to fetch."""
    described: list[dict[str, Any]] = [
        {
            "name": run.name,
            "color": color_of(number),
            "attention": facts.attention(run),
            "results": facts.results(run),
            "calls": facts.calls(run),
        }
        for number, run in enumerate(runs)
    ]
    columns = [
        name for name in described[0]["results"] if any(run["results"][name] for run in described)
    ]
    models: dict[str, list[str]] = {}
    for run in runs:
        if text := facts.model(run):
            models.setdefault(text, []).append(run.name)
    differ, same = facts.arguments(runs)
    page = Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text("utf-8"))
    text = page.render(
        title=title,
        version=__version__,
        runs=described,
        columns=columns,
        models=models,
        charts=[(panel, svg) for panel in PANELS if (svg := draw_svg(panel, runs))],
        missing=facts.missing(runs),
        operations=list(dict.fromkeys(name for run in described for name in run["calls"])),
        differ=differ,
        same=same,
    )
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def draw_svg(panel: Panel, runs: list[RunLog]) -> Markup | None:
    """Return a chart as SVG whose text and axes take the page's colours; ``None`` if empty."""
    colors = {"text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK}
    colors |= {"xtick.color": INK, "ytick.color": INK, "grid.color": GRID}
    with pyplot.rc_context(LOOK | colors):
        figure, axis = pyplot.subplots(figsize=_size(panel, runs), layout="constrained")
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
    svg = svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    # Ids are unique within a page only with a mark of their own.
    mark = re.sub(r"\W+", "-", panel.title.lower())
    return Markup(re.sub(r'(id="|href="#|url\(#)', rf"\1{mark}-", svg))


def _size(panel: Panel, runs: list[RunLog]) -> tuple[float, float]:
    return (13.0, 1.5 + 0.4 * len(runs)) if panel.wide else (5.0, 3.1)


def write_png(runs: list[RunLog], title: str, path: Path) -> None:
    """Write all charts as one picture, up to three in a row, on white.

    Raises:
        ConfigError: there is nothing to draw.
    """
    with pyplot.rc_context(LOOK | {"grid.color": "#dfe3e8"}):
        # Drawing tells whether there is anything to draw.
        probe = pyplot.figure()
        panels = [panel for panel in PANELS if panel.show(probe.add_subplot(), runs)]
        pyplot.close(probe)
        require(
            bool(panels),
            f"--output {path}: the runs logged nothing that is drawn, write a page (.html) of them",
        )
        normal = [panel for panel in panels if not panel.wide]
        wide = [panel for panel in panels if panel.wide]
        columns = min(3, max(len(normal), 1))
        titles = [panel.title for panel in normal] + ["."] * (-len(normal) % columns)
        mosaic = [titles[start : start + columns] for start in range(0, len(titles), columns)]
        heights = [3.1] * len(mosaic) + [_size(panel, runs)[1] for panel in wide]
        mosaic += [[panel.title] * columns for panel in wide]
        figure = pyplot.figure(figsize=(5.2 * columns, sum(heights) + 0.5), layout="constrained")
        axes = figure.subplot_mosaic(mosaic, height_ratios=heights)
        for panel in panels:
            panel.show(axes[panel.title], runs)
            axes[panel.title].set_title(panel.title, loc="left", weight="bold")
        figure.suptitle(title, fontsize=13, weight="bold", x=0.01, ha="left")
        try:
            with whole_file(path) as file:
                figure.savefig(file, dpi=100)
        finally:
            pyplot.close(figure)
