"""The command report, on event files written here."""

import html
import html.parser
import math
import os
import re
import shutil
import sys
import xml.etree.ElementTree

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")

from matplotlib import image, pyplot
from torch.utils.tensorboard import SummaryWriter

from megatron_dsa.errors import ConfigError, VersionError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.report import facts
from megatron_dsa.extras.report.events import RunLog, find_runs, read_run
from megatron_dsa.extras.report.page import draw_svg, write_png
from megatron_dsa.extras.report.panels import PANELS, draw_loss, smoothed, thinned

LAYERS = (2, 3, 10)


def write_session(folder, steps, *, arguments=(), loss=0.0, calls=1):
    """Write one process's events of a sparse run."""
    with SummaryWriter(str(folder)) as writer:
        for name, value in dict(arguments).items():
            writer.add_text(name, str(value), global_step=steps[0] - 1)
        for step in steps:
            scalars = {
                "lm loss": loss + 5 / step,
                "batch-size": 4,
                "learning-rate": 0.1 / step,
                "grad-norm": 1.0 + step,
                "iteration-time": 0.25,
                "throughput": 300.0,
                "dsa/mfu": 0.3,
                "mem-max-allocated-bytes": 3 * 2**30,
                "dsa/indexer-loss": 0.1,
                "dsa/mass-captured": 0.7,
                "dsa/calls/indexer_topk/torch": calls * (step - steps[0] + 1),
                "dsa/time/sparse_attention_forward": 0.05,
                "dsa/time/indexer_topk": 0.1,
            }
            scalars |= {f"dsa/indexer-loss/layer-{layer}": layer / 100 for layer in LAYERS}
            scalars |= {f"dsa/mass-captured/layer-{layer}": layer / 20 for layer in LAYERS}
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)
            if step % 4 == 0:
                writer.add_scalar("lm loss validation", loss + 5.5 / step, step)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Write folders of a dense and a sparse run, resumed from an earlier step."""
    folder = tmp_path_factory.mktemp("logs")
    arguments = {"num_layers": 10, "hidden_size": 64, "num_attention_heads": 4, "bf16": True}
    arguments |= {"seq_length": 100, "csa_compress_ratios": None, "dsa_indexer_topk": 16}
    sparse = arguments | {"dsa_stage": "sparse", "lr": 0.1, "note": "<i>&"}
    write_session(folder / "sparse <b>" / "events", range(1, 11), arguments=sparse)
    write_session(folder / "sparse <b>" / "events", range(8, 13), loss=1.0, arguments=sparse)
    with SummaryWriter(str(folder / "dense" / "events")) as writer:
        for name, value in (arguments | {"dsa_stage": "dense", "lr": 0.1}).items():
            writer.add_text(name, str(value))
        for step in range(1, 13):
            writer.add_scalar("lm loss", 4 / step, step)
            writer.add_scalar("iteration-time", 0.2, step)
            if step % 4 == 0:
                writer.add_scalar("lm loss validation", 4.5 / step, step)
    return folder


@pytest.fixture(scope="module")
def runs(logs):
    return [read_run(name, folder) for name, folder in find_runs([logs]).items()]


def test_runs_are_named_by_what_tells_them_apart(logs):
    assert list(find_runs([logs])) == ["dense", "sparse <b>"]
    assert list(find_runs([logs / "sparse <b>", logs / "dense"])) == ["sparse <b>", "dense"]
    assert list(find_runs([logs / "dense"])) == ["dense/events"]


def test_a_run_may_lie_in_the_folder_of_another(tmp_path):
    for folder in (tmp_path / "first", tmp_path / "first" / "second"):
        folder.mkdir()
        (folder / "events.out.tfevents.1").touch()
    assert list(find_runs([tmp_path])) == ["first", "first/second"]


def test_a_resumed_run_is_one_run(runs):
    """A repeated step's later value must count, and reset counters must be added."""
    sparse = runs[1]
    losses = dict(sparse.scalars["lm loss"])
    assert list(losses) == list(range(1, 13))
    assert losses[7] == pytest.approx(5 / 7) and losses[8] == pytest.approx(1 + 5 / 8)
    assert facts.calls(sparse) == {"indexer_topk": {"torch": 10 + 5}}
    assert list(sparse.layers("dsa/indexer-loss")) == list(LAYERS)
    assert sparse.texts["num_layers"] == "10"


def test_no_value_of_a_long_run_is_left_out(tmp_path):
    """TensorBoard's reader subsamples long series by default."""
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(10_050):
            writer.add_scalar("lm loss", step, step)
    assert len(read_run("long", tmp_path).scalars["lm loss"]) == 10_050


def test_facts(runs):
    dense, sparse = runs
    assert facts.model(sparse) == "10 layers of 64, 4 heads, 100 tokens, bf16"
    assert facts.attention(sparse) == "DSA, stage sparse, K = 16"
    assert facts.attention(dense) == "MLA, stage dense"
    assert facts.results(sparse) == {
        "steps": "12", "lm loss": "1.477", "validation": "1.458", "ms per step": "250",
        "tokens/s": "1,600", "TFLOP/s per GPU": "300", "MFU": "30.0 %", "peak memory": "3.0 GiB",
    }  # fmt: skip
    assert facts.results(dense)["tokens/s"] == ""
    assert list(facts.missing(runs)) == [] and "memory" in facts.missing([dense])
    differ, same = facts.arguments(runs)
    assert differ == {"dsa_stage": ["dense", "sparse"], "note": ["", "<i>&"]}
    assert same["lr"] == "0.1"


def test_what_was_not_logged_is_empty():
    log = RunLog("run", {"learning-rate": [(1, 0.1)]}, {}, {})
    assert set(facts.results(log).values()) == {""}


def test_arguments_may_differ_at_their_ends():
    texts = [{"csa_compress_ratios": f"[{'128, 4, ' * 60}{last}]"} for last in (0, 4)]
    differ, same = facts.arguments([RunLog("run", {}, {}, text) for text in texts])
    assert differ == {"csa_compress_ratios": [text["csa_compress_ratios"] for text in texts]}
    assert same == {}


@pytest.mark.parametrize("every", [1, 10])
def test_the_first_tenth_of_the_losses_does_not_scale_the_chart(every):
    steps = range(every, 1001, every)
    losses = [(step, 100.0 if step <= 100 else 2.0 + step % 2) for step in steps]
    axis = pyplot.figure().add_subplot()
    assert draw_loss(axis, [RunLog("run", {"lm loss": losses}, {}, {})])
    assert axis.get_ylim()[1] < 4
    pyplot.close(axis.figure)


def test_a_run_that_becomes_nan_is_reported_as_nan():
    for place in range(10, 20):
        losses = [(step, math.nan if step == place else 2.0 + step) for step in range(20)]
        run = RunLog("run", {"lm loss": losses}, {}, {})
        assert facts.results(run)["lm loss"] == "nan"
        assert math.isnan(facts.settled(losses))
        axis = pyplot.figure().add_subplot()
        assert draw_loss(axis, [run])
        assert 20 < axis.get_ylim()[1] < 23
        pyplot.close(axis.figure)


def test_smoothed_lines_follow_their_series():
    series = [(step, float(step % 2)) for step in range(400)]
    series[10] = (10, math.nan)
    means = dict(smoothed(series))
    assert means[0] == 0 and 10 not in means and len(means) == 399
    assert all(abs(means[step] - 0.5) < 0.1 for step in range(60, 400))
    weights = [0.95 ** (5 - step) for step in range(6)]
    values = [step % 2 for step in range(6)]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert means[5] == pytest.approx(mean)


def test_shares_of_a_step_add_up_to_it(runs):
    dense, sparse = map(facts.step_shares, runs)
    assert sparse == pytest.approx(
        {"indexer_topk": 0.1, "sparse_attention_forward": 0.05, "everything else": 0.1}
    )
    assert dense == {}


def test_thinned_lines_keep_means_and_ends():
    series = [(step, float(step % 7)) for step in range(1, 1001)]
    few = thinned(series, 50)
    assert len(few) == 50 and few[-1][0] == 1000
    assert sum(value for _, value in few) / 50 == pytest.approx(
        sum(value for _, value in series) / 1000
    )
    assert thinned(series[:40], 50) == series[:40]


class Page(html.parser.HTMLParser):
    """Ids, references and open tags of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.fetched, self.links, self.tags = [], [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif tag == "a":
                self.links.append(value)
            elif name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.fetched.append(value)


def test_page_needs_nothing_else(logs, tmp_path, capsys):
    target = tmp_path / "report.html"
    shutil.copytree(logs, tmp_path / "logs")
    command = ["report", str(tmp_path / "logs"), "--output", str(target), "--title", "a < b"]
    assert main(command) == 0
    assert "2 run(s): dense, sparse <b>" in capsys.readouterr().out
    text = target.read_text(encoding="utf-8")
    page = Page(text)
    assert page.links == ["logs/dense/events", "logs/sparse%20%3Cb%3E/events"]
    assert not page.fetched and not page.tags & {"script", "link", "img", "b", "i"}
    assert len(set(page.ids)) == len(page.ids)
    assert "a &lt; b" in text and "sparse &lt;b&gt;" in text and "&lt;i&gt;&amp;" in text
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    titles = [panel.title for panel in PANELS if f"<h3>{panel.title}</h3>" in html.unescape(text)]
    assert len(charts) == len(titles) == len(PANELS)
    for chart in charts:
        xml.etree.ElementTree.fromstring(chart)
        assert "var(--ink)" in chart
    for reference in re.findall(r"url\(#([^)]*)\)", text):
        assert reference in page.ids
    assert '<span class="warn">torch</span>' in text and "100 ms (40 %)" in text


def test_only_what_was_logged_is_drawn(runs):
    dense = runs[:1]
    drawn = {panel.title for panel in PANELS if draw_svg(panel, dense)}
    assert drawn == {"Language-model loss"}
    assert not pyplot.get_fignums()


def test_no_axis_prints_a_formula(runs):
    for panel in PANELS:
        figure, axis = pyplot.subplots()
        panel.show(axis, runs)
        figure.canvas.draw()
        assert not [label for label in axis.get_yticklabels() if "$" in label.get_text()]
        pyplot.close(figure)


def test_a_short_range_of_a_logarithmic_axis_prints_no_formula():
    series = {"dsa/indexer-loss/layer-1": [(1, 2.1e-3), (2, 4.2e-3)]}
    (panel,) = (panel for panel in PANELS if panel.title == "Indexer loss")
    svg = draw_svg(panel, [RunLog("run", series, {}, {})])
    assert "4e\N{MINUS SIGN}03" in svg and "mathdefault" not in svg


@pytest.mark.parametrize("name", ["$\\frac{$", "a\nb", "name"])
def test_names_and_texts_that_are_no_markup(name, tmp_path):
    from torch.utils.tensorboard import summary

    folder = tmp_path / "events"
    with SummaryWriter(str(folder)) as writer:
        for step in (1, 2):
            writer.add_scalar("lm loss", 1 / step, step)
        text = summary.text("note", "text")
        text.value[0].tensor.string_val[0] = b"caf\xe9"
        writer.file_writer.add_summary(text, 1)
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copytree(folder, runs / name)
    shutil.copytree(folder, runs / "other")
    files = [str(tmp_path / f"report.{ending}") for ending in ("html", "png")]
    title = os.fsdecode(b"caf\xe9 $\\frac{$")
    assert main(["report", str(runs), "--output", *files, "--title", title]) == 0
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert name in page and "caf\\xe9" in page and "caf\\udce9 $\\frac{$" in page
    (runs / "other").rename(runs / os.fsdecode(b"caf\xe9"))
    with pytest.raises(ConfigError, match="must be a path in UTF-8"):
        main(["report", str(runs), "--output", *files])


@pytest.mark.parametrize("content", [b"\xff\xfe text", b"", bytes(range(256)) * 4])
def test_files_that_are_no_events(content, tmp_path):
    (tmp_path / "events.out.tfevents.1").write_bytes(content)
    with pytest.raises(ConfigError, match="no run holds scalars yet"):
        main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")])


def test_picture(logs, tmp_path):
    target = tmp_path / "report.png"
    assert main(["report", str(logs), "--output", str(target)]) == 0
    picture = image.imread(target)
    assert picture.shape[1] == 1560
    # Every part must be drawn.
    for part in (picture[:, :520], picture[:, 520:1040], picture[:, 1040:]):
        assert part[..., :3].std() > 0.02
    assert not pyplot.get_fignums()


def test_a_picture_of_nothing_is_refused(tmp_path):
    log = RunLog("run", {"batch-size": [(1, 4)]}, {}, {})
    with pytest.raises(ConfigError, match="nothing that is drawn, write a page"):
        write_png([log], "title", tmp_path / "report.png")
    assert not pyplot.get_fignums()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere"], "is no folder"),
        (["{tmp}"], "--tensorboard-dir DIR"),
        (["{logs}", "--output", "{tmp}/report.pdf"], "must end in .html or .png"),
        (["{logs}", "--output", "{tmp}/deep/report.html"], "make it"),
    ],
)
def test_refusals(arguments, message, logs, tmp_path):
    arguments = [argument.format(tmp=tmp_path, logs=logs) for argument in arguments]
    with pytest.raises(ConfigError, match=message):
        main(["report", *arguments])


@pytest.mark.parametrize("package", ["tensorboard", "matplotlib"])
def test_missing_package_is_named(package, logs, tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == package or name.startswith("megatron_dsa.extras.report.p"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(VersionError, match=r"megatron-dsa\[report\]"):
        main(["report", str(logs), "--output", str(tmp_path / "report.html")])


def test_a_run_without_scalars_is_left_out_by_name(logs, tmp_path, capsys):
    SummaryWriter(str(tmp_path / "evaluated")).close()
    page = str(tmp_path / "report.html")
    with pytest.raises(ConfigError, match="no run holds scalars yet"):
        main(["report", str(tmp_path), "--output", page])
    assert main(["report", str(tmp_path), str(logs), "--output", page]) == 0
    left_out, written = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"left out: \S*evaluated holds no scalars", left_out)
    assert "2 run(s)" in written and "evaluated" not in written
