"""Measures of ``examples/conversion``: losses by position, probes, selection; charts."""

import csv
import re

import numpy
import pytest
import torch

from tests.cases.conversion import module
from tests.cases.models import MODELS, gpt, tokens
from tests.host import start

held_out, probes = module("held_out"), module("probes")


def measured_losses(seed=0, sequences=30, length=512):
    """Return losses, their mask, and documents at arbitrary offsets."""
    rng = numpy.random.default_rng(seed)
    losses = rng.gamma(2.0, 1.0, (sequences, length))
    counted = rng.random((sequences, length)) < 0.9
    starts = numpy.sort(rng.choice(sequences * length, 11, replace=False))
    documents = numpy.searchsorted(starts, numpy.arange(sequences * length), side="right")
    return losses, counted, documents.reshape(sequences, length)


def test_losses_by_position_and_document_add_up():
    losses, counted, documents = measured_losses()
    sums = held_out.sums_by_document(losses, counted, documents)
    found = held_out.summary(sums)
    assert found["all"][0] == pytest.approx(losses[counted].mean(), rel=1e-12)
    assert found["all"][2] == 12
    weighted = 0.0
    for first, end in held_out.bands(512):
        mean, _, _ = found[f"{first}-{end}"]
        inside = losses[:, first:end][counted[:, first:end]]
        assert mean == pytest.approx(inside.mean(), rel=1e-12)
        weighted += mean * len(inside)
    assert weighted / counted.sum() == pytest.approx(found["all"][0], rel=1e-12)
    of_one = losses[counted & (documents == 3)]
    total = sum(total for (document, _), (total, _) in sums.items() if document == 3)
    assert total == pytest.approx(of_one.sum(), rel=1e-12)


def test_standard_error_of_equal_clusters_is_that_of_their_means():
    means = numpy.array([2.0, 3.0, 2.5, 4.0])
    mean, error = held_out.mean_over_clusters(7 * means, [7] * 4)
    assert mean == pytest.approx(means.mean())
    assert error == pytest.approx(means.std(ddof=1) / 2)
    assert numpy.isnan(held_out.mean_over_clusters([3.0], [2])[1])


def test_gaps_are_paired():
    """Difficulty shared by all models must not enter the error."""
    losses, counted, documents = measured_losses()
    hard = losses + 3 * (documents % 3)
    mine, theirs = (
        held_out.sums_by_document(values, counted, documents) for values in (hard + 0.25, hard)
    )
    for value, error in held_out.gaps(mine, theirs).values():
        assert value == pytest.approx(0.25)
        assert error == pytest.approx(0.0, abs=1e-12)
    assert held_out.summary(mine)["all"][1] > 0.1
    others = held_out.sums_by_document(hard, counted, documents + 1)
    with pytest.raises(ValueError, match="different documents"):
        held_out.gaps(mine, others)


def text(sequences=6, length=512):
    """Return token ids with hardly any repeated pair."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 50000, (sequences, length), generator=generator)


def looks_back(window, context=2):
    """Return a model that finds the last tokens again within ``window``, and continues from
    there.
    """

    def predict(sequence, positions):
        ids = sequence.tolist()
        found = []
        for p in positions.tolist():
            last = ids[p - context + 1 : p + 1]
            before = range(p - 1, max(p - window, context) - 1, -1)
            places = (q for q in before if ids[q - context + 1 : q + 1] == last)
            place = next(places, None)
            found.append(-1 if place is None else ids[place + 1])
        return torch.tensor(found)

    return predict


@pytest.mark.parametrize(("window", "reached"), [(600, 4), (350, 3), (90, 1), (20, 0)])
def test_a_model_that_looks_back_solves_what_it_reaches(window, reached):
    found = probes.probe(looks_back(window), text())
    far = ["64", "128", "256", "448"]
    expected = {part: float(number < reached) for number, part in enumerate(far)}
    for kind, parts in found.items():
        assert {part: figures[0] for part, figures in parts.items() if part != "none"} == expected
        assert all(error == 0.0 and number == 6 for _, error, number in parts.values()), kind
    assert found["copy"]["none"][0] == 0.0 and "none" not in found["look-up"]


def test_a_look_up_is_not_solved_by_position():
    """A model that repeats tokens at a fixed distance copies, but does not look up."""

    def predict(sequence, positions):
        return sequence[positions + 1 - 256]

    found = probes.probe(predict, text(40))
    assert found["copy"]["256"][0] == 1.0
    assert found["look-up"]["256"][0] < 0.5
    assert found["look-up"]["64"][0] == found["copy"]["64"][0] == 0.0


def test_probes_are_in_the_last_eighth_of_the_same_text():
    sequences = text()
    for make in (probes.copies, probes.lookups):
        made = list(make(sequences, torch.Generator().manual_seed(1)))
        again = list(make(sequences, torch.Generator().manual_seed(1)))
        assert len(made) == 6
        for probe, same, original in zip(made, again, sequences, strict=True):
            assert torch.equal(probe.tokens, same.tokens) and probe.asked == same.asked
            assert 16 < (probe.tokens != original).sum() < 140
            asked = [position for part in probe.asked.values() for position in part]
            assert min(asked) >= 448 and max(asked) + 1 < 512
            assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(
    ("sequences", "why"),
    [
        (text(1), "2 sequences of 512"),
        (text(4, 256), "4 of 256"),
        (text() % 15, "16 different tokens, got 15"),
    ],
)
def test_text_that_probes_do_not_fit_into_is_refused(sequences, why):
    with pytest.raises(ValueError, match=why):
        probes.probe(looks_back(8), sequences)


def small_model(name):
    """Return a small GPT model with selecting layers, in evaluation mode."""
    make, positional, fields = MODELS[name]
    return gpt(make(*positional, **fields)).eval()


@torch.no_grad()
def run(model, seed=5):
    ids = tokens(seed)
    return model(ids, torch.arange(64, device=ids.device)[None], None)[0], ids[0]


@pytest.mark.parametrize("name", ["DSA", "masked"])
def test_mass_and_recall_of_the_selection(name):
    from megatron_dsa.metrics.quality import captured_mass

    selection = module("selection")
    model, seen = small_model(name), {}
    with selection.measured(model, seen.__setitem__):
        run(model)
    selecting = {
        core.layer_number
        for core in model.modules()
        if getattr(core, "indexer", None) is not None and hasattr(core, "record_health")
    }
    assert set(seen) == selecting and len(seen) >= 2
    for attended in seen.values():
        found, topk = selection.quality(attended, 16), attended.topk
        keys, q = attended.keys().expanded(), attended.q
        queries = [position for position in range(3, 64, 4) if position + 1 > topk]
        mass, best, recall = [], [], []
        for position in queries:
            logits = torch.einsum("hd,khd->hk", q[position], keys[: position + 1])
            p = (logits * attended.softmax_scale).softmax(-1).mean(0)
            chosen = attended.indices[position].long()
            top = p.topk(topk)
            mass.append(p[chosen].sum())
            best.append(top.values.sum())
            recall.append(torch.isin(top.indices, chosen).double().mean())
        for figure, expected in (("mass", mass), ("best mass", best), ("recall", recall)):
            torch.testing.assert_close(found[figure].double(), torch.stack(expected).double(),
                                       rtol=1e-6, atol=1e-7)  # fmt: skip
        assert (found["mass"] <= found["best mass"] + 1e-9).all()
        captured = captured_mass(
            q, attended.kv, attended.indices, attended.lse, attended.layout,
            softmax_scale=attended.softmax_scale, k_pe=attended.k_pe, w_uk=attended.weights,
            queries=torch.tensor(queries, device=start()),
        )  # fmt: skip
        torch.testing.assert_close(found["mass"], captured.mean(-1), rtol=1e-6, atol=1e-7)


def test_predictions_are_those_of_all_logits():
    measures = module("measures")
    model = small_model("DSA")
    logits, ids = run(model)
    asked = torch.tensor([60, 3, 17])
    with torch.no_grad():
        found = measures.predictor(model)(ids.cpu(), asked)
    assert torch.equal(found, logits[asked].argmax(-1))
    assert torch.equal(run(model)[0], logits)  # the hook is gone


def write(file, columns, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([columns, *rows])


def made_up_runs(folder):
    """Write the results of two steps of three runs."""
    for number, run in enumerate(["dense_on", "sparse", "sparse_1024"]):
        losses, counted, documents = measured_losses()
        rows, measured, log = [], [], []
        for step in (10, 20):
            sums = held_out.sums_by_document(losses + number / 8 + 1 / step, counted, documents)
            rows += [(step, *key, *of) for key, of in sums.items()]
            mean = held_out.summary(sums)["all"][0]
            log.append(
                f" iteration {step}/ 20 | elapsed time per iteration (ms): 5.0 | lm loss: 1 |"
                + " dsa attention mass captured: 0.9 |" * (run != "dense_on")
            )
            log.append(f" validation-held_out loss at iteration {step} | lm loss value: {mean} |")
            for name in ("mass", "best mass", "recall"):
                if run != "dense_on":
                    measured += [(step, name, f"layer {n}", 0.5 + n / 10, 0.01, 4) for n in (1, 2)]
            if run != "dense_on":
                measured += [(step, "indexer KL", f"layer {n}", 1.5 / n, "", 4) for n in (1, 2)]
            measured += [(step, "copy", part, 0.75, 0.01 * number, 8) for part in ("64", "none")]
            measured += [(step, "look-up", "64", step / 40, 0.01, 8)]
        write(folder / run / "documents.csv", module("measures").DOCUMENTS, rows)
        write(folder / run / "measures.csv", module("measures").MEASURES, measured)
        (folder / run / "train.log").write_text("\n".join(log))


def test_tables_and_charts(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    table, charts = module("table"), module("charts")
    made_up_runs(tmp_path)
    command = ["table", str(tmp_path), "--warmup-steps", "10", "--tokens-per-step", "64"]
    monkeypatch.setattr("sys.argv", command)
    table.main()
    printed = capsys.readouterr().out
    assert "| gap at positions | 0-64 | 64-256 | 256-512 |" in printed
    assert "| sparse | +0.1250 ± 0.0000 | +0.1250 ± 0.0000 | +0.1250 ± 0.0000 |" in printed
    assert "| sparse_1024 | 0.750 ± 0.020 | 0.750 ± 0.020 |" in printed
    assert "| sparse | 0.500 ± 0.010 |" in printed
    losses = re.findall(r"^\| (\w+) \| 20 \| [\d.]+ \| (\S+ ± \S+) \(", printed, re.M)
    assert losses == [
        ("sparse", "+0.1250 ± 0.0000"),
        ("sparse", "+0.0750 ± 0.0000"),
        ("sparse_1024", "+0.2500 ± 0.0000"),
        ("sparse_1024", "+0.2000 ± 0.0000"),
    ]
    layers = [(run, step, 1, 0.5, 0.1) for run in ("sparse", "sparse_1024") for step in (10, 20)]
    write(tmp_path / "layers.csv", ["run", "step", "layer", *table.LAYERS], layers)
    monkeypatch.setattr("sys.argv", ["charts", str(tmp_path), str(tmp_path / "drawn")])
    figures = []
    save = charts.save
    monkeypatch.setattr(charts, "save", lambda *given: figures.append(given[0]) or save(*given))
    charts.main()
    drawn = {file.name for file in (tmp_path / "drawn").iterdir()}
    assert drawn == {"losses.png", "positions.png", "selection.png", "probes.png"}
    assert all(axis.has_data() for figure in figures for axis in figure.axes)
    # The fallback is the mean from the logs.
    (tmp_path / "layers.csv").unlink()
    figures.clear()
    charts.main()
    assert [len(figure.axes) for figure in figures] == [2, 1, 4, 2]
    assert all(axis.has_data() for figure in figures for axis in figure.axes)
