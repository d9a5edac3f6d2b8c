"""A report as one HTML page that needs nothing else, or as one picture."""

from __future__ import annotations

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
from megatron_dsa.tools.report import facts
from megatron_dsa.tools.report.events import RunLog
from megatron_dsa.tools.report.lines import color_of
from megatron_dsa.tools.report.panels import PANELS, Panel

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

TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ground: #ffffff; --card: #f7f8fa; --ink: #20242a;
  --soft: #5c6570; --grid: #dfe3e8; --warn: #a84300; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1d2126; --ink: #e6e9ed;
  --soft: #a3acb7; --grid: #363c44; --warn: #ffb070; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 78rem; background: var(--ground);
  color: var(--ink); font: 15px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
h3 { font-size: .98rem; margin: 0; } p { margin: .15rem 0 .4rem; } .soft { color: var(--soft); }
.card p { font-size: .82rem; color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr)); gap: .9rem; }
.card { background: var(--card); border-radius: .6rem; padding: .8rem .9rem .4rem; min-width: 0; }
.wide { grid-column: 1 / -1; } svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .28rem .8rem .28rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
tr + tr td { border-top: 1px solid var(--grid); }
thead th { color: var(--soft); font-weight: 500; }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%;
  margin-right: .4rem; }
.warn { color: var(--warn); } summary { cursor: pointer; color: var(--soft); }
code { font-size: .85em; overflow-wrap: anywhere; }
</style></head><body>
<h1>{{ title }}</h1>
<p class="soft">megatron_dsa {{ version }}, {{ runs|length }} run{{ "s" if runs|length > 1 }}</p>

<h2>Overview</h2>
<div class="scroll"><table><thead><tr><th>run</th><th>attention</th>
{% for name in columns %}<th class="number">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for run in runs %}<tr><td><span class="dot" style="background:{{ run.color }}"></span>
{{- run.name }}</td><td>{{ run.attention }}</td>
{% for name in columns %}<td class="number">{{ run.results[name] }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% for text, names in models.items() %}<p class="soft">{{ text }}
{%- if models|length > 1 %} ({{ names|join(", ") }}){% endif %}</p>{% endfor %}

<h2>Curves</h2>
<div class="cards">{% for panel, svg in charts %}
<div class="card{{ " wide" if panel.wide }}"><h3>{{ panel.title }}</h3><p>{{ panel.text }}</p>
{{ svg }}</div>{% endfor %}</div>
{% if missing %}<p class="soft">Not in the log:
{% for what, flags in missing.items() %}{{ what }} (<code>{{ flags }}</code>)
{{- ", " if not loop.last }}{% endfor %}.</p>{% endif %}

{% if operations %}<h2>What ran</h2>
<p class="soft">Calls per implementation, of the rank that writes the log.
<span class="warn">torch</span> is the fallback where there is no fused implementation.</p>
<div class="scroll"><table><thead><tr><th>operation</th>
{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr></thead><tbody>
{% for operation in operations %}<tr><td>{{ operation.replace("_", " ") }}</td>
{% for run in runs %}<td>{% for name, count in run.calls.get(operation, {}).items() %}
<span{% if name == "torch" %} class="warn"{% endif %}>{{ name }}</span>
{{ "{:,}".format(count) }}{{ ", " if not loop.last }}{% endfor %}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}

{% if differ or same %}<h2>Arguments</h2>{% endif %}
{% if differ %}<details><summary>{{ differ|length }} that differ</summary><div class="scroll">
<table><thead><tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr></thead>
{% for name, row in differ.items() %}<tr><td>{{ name }}</td>
{% for value in row %}<td><code>{{ value }}</code></td>{% endfor %}</tr>{% endfor %}
</table></div></details>{% endif %}
{% if same %}<details><summary>{{ same|length }} that {{ "are the same" if runs|length > 1 else
"the run had" }}</summary><table>
{% for name, value in same.items() %}<tr><td>{{ name }}</td><td><code>{{ value }}</code></td></tr>
{% endfor %}</table></details>{% endif %}
</body></html>
"""


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
    page = Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE)
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
    path.write_text(text, encoding="utf-8")


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
        rows = -(-len(normal) // columns)
        heights = [3.1] * rows + [_size(panel, runs)[1] for panel in wide]
        figure = pyplot.figure(figsize=(5.2 * columns, sum(heights) + 0.5), layout="constrained")
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        places: list[tuple[int, Any]] = [divmod(number, columns) for number in range(len(normal))]
        places += [(rows + number, slice(None)) for number in range(len(wide))]
        for panel, place in zip(normal + wide, places, strict=True):
            axis = figure.add_subplot(grid[place])
            panel.show(axis, runs)
            axis.set_title(panel.title, loc="left", weight="bold")
        figure.suptitle(title, fontsize=13, weight="bold", x=0.01, ha="left")
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
