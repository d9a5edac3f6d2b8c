"""``examples/conversion``: the corpus, the flags of the runs at full size, and the table."""

import csv
import dataclasses
import json
import re

import numpy
import pytest

from tests.cases.conversion import FOLDER, module
from tests.cases.launch_scripts import EXAMPLES, launch
from tests.host import parsed, stop

PAGE = EXAMPLES.parent / "docs/evidence.md"


@pytest.fixture(scope="module")
def prepare():
    pytest.importorskip("tokenizers")
    return module("prepare")


@pytest.fixture(scope="module")
def table():
    return module("table")


def arrays(*lengths):
    return [numpy.full(length, length, dtype=numpy.int32) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "grouped"),
    [
        ((3, 4, 5, 6), [[3, 4, 5, 6]]),  # 12, and what is left is added
        ((12, 3, 9, 1), [[12], [3, 9, 1]]),
        ((4, 5), []),
        ((30,), [[30]]),
        ((), []),
    ],
)
def test_files_are_grouped_into_long_documents(prepare, lengths, grouped):
    found = list(prepare.documents(iter(arrays(*lengths)), 10))
    assert [[len(file) for file in document] for document in found] == grouped


def test_whole_units_are_held_out_always_the_same(prepare):
    sizes = {f"drivers/{number}": 100 for number in range(50)} | {"arch/x86": 4000, "empty": 0}
    chosen = prepare.held_out_units(sizes, 0.1)
    # 10 % of 9000 bytes; the large one would be most of the set.
    assert len(chosen) == 9 and not chosen & {"arch/x86", "empty"}
    assert prepare.held_out_units(dict(reversed(sizes.items())), 0.1) == chosen


def test_units_are_folders_and_small_ones_are_joined(prepare, tmp_path):
    text = {"a/b/c/x.c": 9, "a/b/y.c": 9, "a/z.c": 1, "d/e/f.c": 2, "d/g/h.c": 3, "i/j.o": 9}
    for name, size in (text | {"gone/k.c": 50}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x" * size)
    (tmp_path / "a/link.c").symlink_to(tmp_path / "a/z.c")
    units = prepare.find_units(tmp_path, [], ["gone"], [".c"])
    assert set(units) == {"a/b", "a", "d/e", "d/g"}
    joined, sizes = prepare.join_small(tmp_path, units, 10)
    files = {name: [file.as_posix() for file in found] for name, found in joined.items()}
    assert files == {
        "a/b": ["a/b/c/x.c", "a/b/y.c"],
        "a": ["a/z.c"],
        "d": ["d/e/f.c", "d/g/h.c"],
    }
    assert sizes == {"a/b": 18, "a": 1, "d": 5}


def test_corpus(prepare, tmp_path, monkeypatch, capsys):
    """Both data sets hold the text, in documents that end in the last id; none is in both."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    source, output = tmp_path / "source", tmp_path / "output"
    for number in range(12):
        for file in range(3):
            path = source / f"top/unit{number}/{file}.c"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"int value_{number}_{file} = {number * 7 + file};\n" * 40)
    command = ["prepare", "--source", source, "--output", output, "--vocabulary", 280]
    command += ["--document-tokens", 500, "--held-out", 0.5, "--tokenizer-files", 1]
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    prepare.main()
    assert capsys.readouterr().out.endswith("--tokenizer-type NullTokenizer --vocab-size 280\n")
    facts = json.loads((output / "corpus.json").read_text())
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 280
    assert tokenizer.token_to_id(prepare.END) == 279
    texts = {}
    for name in ("train", "held_out"):
        data = IndexedDataset(str(output / name))
        assert len(data) == facts[name]["documents"]
        ids = [data[number] for number in range(len(data))]
        assert sum(map(len, ids)) == facts[name]["tokens"]
        assert min(map(len, ids)) == facts[name]["shortest document"] > 500
        assert all(document[-1] == 279 and (document[:-1] < 279).all() for document in ids)
        texts[name] = "".join(tokenizer.decode(document[:-1].tolist()) for document in ids)
    assert facts["held_out"]["units"]
    for name, other in (("train", "held_out"), ("held_out", "train")):
        for unit in facts[name]["units"]:
            number = unit.removeprefix("top/unit")
            for file in range(3):
                expected = prepare.read(source, source.joinpath(f"{unit}/{file}.c"))
                expected = expected.split("\n", 1)[1]
                assert f"==> {unit}/{file}.c <==\n{expected}" in texts[name]
            assert f"value_{number}_" not in texts[other]


def test_a_vocabulary_that_the_text_cannot_fill_is_refused(prepare):
    with pytest.raises(SystemExit, match="gives 257 tokens, not --vocabulary 300"):
        prepare.train_tokenizer(iter(["x"]), 300)


#: Run -> script, run that it starts from, stage, steps, highest and last rate.
RUNS = {
    "dense": ("dense.sh", None, "dense", 1500, 6e-4, 2e-5),
    "dense_on": ("dense_on.sh", "dense", "dense", 2100, 2e-5, 2e-5),
    "warmup": ("sparse.sh", "dense", "warmup", 1600, 1e-3, 1e-3),
    "sparse": ("sparse.sh", "warmup", "sparse", 2100, 2e-5, 2e-5),
    "sparse_without_warmup": ("sparse_without_warmup.sh", "dense", "sparse", 2100, 2e-5, 2e-5),
    "scratch": ("scratch.sh", None, "sparse", 2100, 6e-4, 2e-5),
}


def trained_to(folder, run, step):
    """Pretend that a run has a checkpoint."""
    (folder / run).mkdir(parents=True, exist_ok=True)
    (folder / run / "latest_checkpointed_iteration.txt").write_text(str(step))


def flags_of_run(folder, run, *arguments, **variables):
    """Return the flags that a run is launched with where the runs before it are trained."""
    script, start, *_ = RUNS[run]
    trained_to(folder, "dense", 1500 if run != "dense" else 0)
    if start == "warmup":
        trained_to(folder, "warmup", 1600)
    launch(f"conversion/{script}", folder, {"RUN_DIR": str(folder)} | variables, *arguments)
    command, _ = json.loads((folder / run / "train.log").read_text())
    if "--dsa-dry-run" in arguments:
        assert command[:2] == ["-m", "megatron_dsa.pretrain"]
        return command[2:]
    assert command[:3] == ["examples/conversion/train.py", "--measures", str(folder / run)]
    return command[3:]


@pytest.mark.parametrize("run", RUNS)
def test_runs_at_full_size(run, tmp_path, monkeypatch):
    _, start, stage, steps, rate, last = RUNS[run]
    flags = flags_of_run(tmp_path, run, "--log-interval", "7")
    args = parsed(flags, 1, monkeypatch)
    assert (args.num_layers, args.num_attention_heads, args.kv_lora_rank) == (12, 16, 512)
    assert (args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim) == (128, 64, 128)
    assert (args.dsa_indexer_n_heads, args.dsa_indexer_head_dim) == (16, 128)
    assert (args.seq_length, args.dsa_indexer_topk, args.bf16) == (8192, 2048, True)
    assert (args.dsa_stage, args.train_iters, args.lr, args.min_lr) == (stage, steps, rate, last)
    assert args.train_data_path == [f"{tmp_path}/data/train"]
    assert args.valid_data_path == [f"{tmp_path}/data/held_out"]
    assert args.load == str(tmp_path / (start or run)) and args.save == str(tmp_path / run)
    assert bool(args.no_load_optim) == bool(start)
    assert args.log_interval == 7
    assert args.dsa_evaluate_indexer == (stage != "dense")
    assert args.full_validation and args.multiple_validation_sets and args.exit_signal_handler


def test_a_dry_run_plans_without_measures(tmp_path, monkeypatch):
    flags = flags_of_run(tmp_path, "dense_on", "--dsa-dry-run")
    args = parsed([flag for flag in flags if flag != "--dsa-dry-run"], 1, monkeypatch)
    assert args.train_iters == 2100


#: Run of ``GPU30`` -> its last step and its rate.
GPU30 = {"dense": (840, 1e-3), "dense_on": (1020, 3.3e-5), "sparse_without_warmup": (1020, 3.3e-5)}


@pytest.mark.parametrize("run", GPU30)
def test_runs_for_30_minutes(run, tmp_path, monkeypatch):
    args = parsed(flags_of_run(tmp_path, run, GPU30="1"), 1, monkeypatch)
    assert (args.train_iters, args.lr) == GPU30[run]
    assert (args.num_layers, args.hidden_size, args.seq_length) == (12, 768, 8192)
    assert (args.global_batch_size, args.dsa_indexer_topk) == (4, 2048)
    assert (args.eval_interval, args.lr_warmup_iters) == ((420, 60) if run == "dense" else (60, 0))


def test_a_warm_up_serves_all_numbers_of_keys(tmp_path, monkeypatch):
    """Every one has a run; ``ONLY`` picks one."""
    trained_to(tmp_path, "dense", 1500)
    trained_to(tmp_path, "warmup", 1600)
    trained_to(tmp_path, "sparse", 2100)
    places = {"RUN_DIR": str(tmp_path), "TOPK": "2048 1024 512"}
    done = launch("conversion/sparse.sh", tmp_path, places | {"ONLY": "512"})
    assert done.returncode == 3 and "sparse_512 was stopped at step 0" in done.stderr
    assert not (tmp_path / "sparse_1024").exists()
    command, _ = json.loads((tmp_path / "sparse_512/train.log").read_text())
    args = parsed(command[3:], 1, monkeypatch)
    assert (args.dsa_indexer_topk, args.load) == (512, str(tmp_path / "warmup"))
    launch("conversion/sparse.sh", tmp_path, places)
    command, _ = json.loads((tmp_path / "sparse_1024/train.log").read_text())
    assert parsed(command[3:], 1, monkeypatch).dsa_indexer_topk == 1024


#: What K/S of 1/16 and 1/32, the variants, the equal runs and V4 change in the flags of a run.
NAMED = {
    "dense_on_again": {"dsa_stage": "dense", "dsa_indexer_topk": 2048},
    "sparse_again": {"dsa_indexer_topk": 2048, "dsa_selected_attention": "auto"},
    "sparse_512": {"dsa_indexer_topk": 512, "dsa_indexer_numerics": "exact"},
    "sparse_256": {"dsa_indexer_topk": 256, "dsa_fp8_selection": False},
    "sparse_absorbed": {"dsa_indexer_topk": 2048, "dsa_selected_attention": "sparse"},
    "sparse_masked": {"dsa_indexer_topk": 2048, "dsa_selected_attention": "masked"},
    "sparse_fp8_scores": {"dsa_indexer_topk": 2048, "dsa_indexer_numerics": "deepgemm-fp8"},
    "sparse_256_fp8": {"dsa_indexer_topk": 256, "dsa_fp8_selection": True},
    "v4": {"dsa_indexer_topk": 512, "csa_compress_ratios": [0, 0] + 5 * [4, 128]},
}


def all_runs(folder, *names, **variables):
    """Let ``all.sh`` train these runs where the corpus and the runs before them are there."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/corpus.json").write_text("{}")
    variables = {"RUN_DIR": str(folder), "GPU30": "1"} | variables
    return launch("conversion/all.sh", folder, variables, *names)


@pytest.mark.parametrize("run", NAMED)
def test_named_runs_parse_and_plan(run, tmp_path, monkeypatch, capsys):
    """Every run that ``all.sh`` takes the name of, at the size of ``GPU30``, on an H100."""
    from megatron_dsa.tools.planner.command import dry_run

    trained_to(tmp_path, "dense", 840)
    trained_to(tmp_path, "warmup", 900)
    done = all_runs(tmp_path, run)
    assert done.returncode == 3 and f"{run} was stopped at step 0" in done.stderr
    command, _ = json.loads((tmp_path / run / "train.log").read_text())
    flags = command[3:]
    args = parsed(flags, 1, monkeypatch)
    assert {name: getattr(args, name) for name in NAMED[run]} == NAMED[run]
    start = None if run == "v4" else "dense" if run == "dense_on_again" else "warmup"
    assert args.load == str(tmp_path / (start or run)) and bool(args.no_load_optim) == bool(start)
    assert (args.train_iters, args.lr) == (1020, 3.3e-5 if start else 1e-3)
    capsys.readouterr()
    stop()  # a plan has process groups of its own
    assert dry_run(["pretrain", *flags, "--dsa-dry-run", "--dsa-dry-run-gpu", "h100"]) == 0
    plan = capsys.readouterr().out
    # The teacher of absorbed attention has a fused kernel in cuDNN's front end alone.
    assert set(re.findall(r"^  (\w+): torch", plan, re.M)) <= {"sparse_attention_probabilities"}
    weights = float(re.search(r"weights.*\n +0 +(\S+)", plan)[1])
    millions = 157 if run == "v4" else 149 if "dense" in run else 160
    assert weights == pytest.approx(2e6 * millions / 2**30, rel=0.005)


def test_what_is_done_and_what_is_left(tmp_path):
    """With what runs start from, and times of steps from logs where there are any."""
    trained_to(tmp_path, "dense", 420)
    log = "iteration 10 | elapsed time per iteration (ms): {}.0 |\n"
    times = "".join(log.format(value) for value in (900, 500, 400))
    (tmp_path / "dense/train.log").write_text(times)
    done = all_runs(tmp_path, "sparse_256_fp8", "dense_on", PLAN="1")
    # Half of dense at 0.5 s a step; the start of a process and its evaluations take 65 s.
    assert done.stdout.splitlines() == [
        "== dense: 420 of 840 steps left, about 4.6 minutes",
        "== warmup: 60 of 900 steps left, about 1.8 minutes",
        "== sparse_256_fp8: 120 of 1020 steps left, about 2.2 minutes",
        "== dense_on: 180 of 1020 steps left, about 1.9 minutes",
        "== about 10.5 minutes left",
    ]
    trained_to(tmp_path, "dense", 840)
    assert "== dense: done, step 840" in all_runs(tmp_path, PLAN="1").stdout
    assert not (tmp_path / "warmup").exists()


def test_the_page_lists_the_runs(tmp_path):
    """Its table has all runs that are tested here; ``all.sh`` knows every one of it."""
    table = PAGE.read_text(encoding="utf-8").split("| run | starts from |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert {*RUNS, *NAMED} <= set(names)
    done = all_runs(tmp_path, *names, PLAN="1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(names) + 1


def test_an_unknown_run_is_refused(tmp_path):
    for name in ("sparse_0", "sparse_fp4", "dence"):
        done = all_runs(tmp_path, name)
        assert done.returncode == 2 and f"no run is called {name}: dense, " in done.stderr
        assert not done.stdout


def test_other_settings_are_refused(tmp_path):
    """They would go on from checkpoints of another seed, without a word."""
    trained_to(tmp_path, "dense", 840)
    assert all_runs(tmp_path, "dense").returncode in (0, 1)
    changes = (
        {"SEED": "2"},
        {"STEPS": "840 60 200"},
        {"TOPK": "1024"},
        {"GPU30": ""},
        {"BATCH": "1"},
    )
    for other in changes:
        done = all_runs(tmp_path, "dense_on", **other)
        assert done.returncode == 2 and "begun with other settings" in done.stderr, other


def test_a_run_continues_and_ends(tmp_path):
    trained_to(tmp_path, "dense_on", 1700)
    flags = flags_of_run(tmp_path, "dense_on")
    assert flags[flags.index("--load") + 1] == str(tmp_path / "dense_on")
    assert "--no-load-optim" not in flags
    trained_to(tmp_path, "dense_on", 2100)
    log = (tmp_path / "dense_on/train.log").read_text()
    done = launch("conversion/dense_on.sh", tmp_path, {"RUN_DIR": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "== dense_on is at step 2100\n")
    assert (tmp_path / "dense_on/train.log").read_text() == log


def test_a_run_without_its_start_is_refused(tmp_path):
    done = launch("conversion/dense_on.sh", tmp_path, {"RUN_DIR": str(tmp_path)})
    assert done.returncode == 2 and "dense has no checkpoint to start from" in done.stderr


def test_without_apt_the_corpus_is_asked_for(tmp_path):
    (tmp_path / "apt-cache").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "apt-cache").chmod(0o755)
    run = tmp_path / "run"
    variables = {"RUN_DIR": str(run), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = launch("conversion/data.sh", tmp_path, variables)
    assert done.returncode == 2 and "set LINUX_SOURCE" in done.stderr
    assert not (run / "data/corpus.json").exists()


LOG = """\
 [x] iteration 10 | elapsed time per iteration (ms): 200.0 | dsa attention mass captured: 5.0E-01 |
 validation-held_out loss at iteration 10 | lm loss value: {0}.5E+00 | lm loss PPL: 1.0E+01 |
 [x] iteration 20 | elapsed time per iteration (ms): 300.0 | dsa attention mass captured: 6.0E-01 |
 validation-held_out loss at iteration 20 | lm loss value: {0}.2E+00 | lm loss PPL: 1.0E+01 |
 validation-held_out loss at iteration 20 on validation set | lm loss value: {0}.0E+00 | lm loss
"""
TRAINING = [
    "run,step,milliseconds,mass",
    "dense_on,10,200.0,0.5",
    "dense_on,20,300.0,0.6",
    "sparse,10,200.0,0.5",
    "sparse,20,300.0,0.6",
]


def test_table(table, tmp_path, monkeypatch, capsys):
    for run, loss in (("dense_on", 4), ("sparse", 5)):
        (tmp_path / run).mkdir()
        (tmp_path / run / "train.log").write_text(LOG.format(loss))
    command = ["table", str(tmp_path), "--warmup-steps", "10", "--tokens-per-step", "64"]
    monkeypatch.setattr("sys.argv", command)
    table.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| dense_on | 20 | 4.0000 | | | 0.600 | 250 |",
        "| sparse | 20 | 5.0000 | +1.0000 (+25.00%) | 20 | 0.600 | 250 |",
        "| sparse | 20 | 5.0000 | +0.5000 (+11.11%) | 10 | 0.600 | 250 |",
    ]
    assert (tmp_path / "validation.csv").read_text().splitlines() == [
        "run,step,tokens,validation_loss",
        "dense_on,10,640,4.5",
        "dense_on,20,1280,4.0",
        "sparse,10,640,5.5",
        "sparse,20,1280,5.0",
    ]
    assert (tmp_path / "training.csv").read_text().splitlines() == TRAINING


def test_a_table_of_nothing_is_refused(table, tmp_path, monkeypatch):
    command = ["table", str(tmp_path), "--warmup-steps", "10", "--tokens-per-step", "64"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match=r"no run in .* has a validation loss"):
        table.main()


def section(title):
    """Return the text of a section of the page."""
    return PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


class OnGPU:
    """What the cells of the page's tables of the runs on a GPU have to be, from their CSVs.

    Every method is a column: given the run, the last step or that of the row, and the run and the
    step that it is compared with.
    """

    def __init__(self):
        self.folder = FOLDER / "gpu30"
        seeds = module("seeds")
        self.sessions, _, _ = seeds.sessions([self.folder])
        self._gap_of, read = seeds.gap_of, module("table").read
        self.files = {n: read(self.folder / f"{n}.csv") for n in ("measures", "training", "runs")}
        self.losses = {
            (row["seed"], row["run"], int(row["step"])): float(row["validation_loss"])
            for row in read(self.folder / "validation.csv")
        }

    def values(self, file, run, column, **chosen):
        """Return the values of the rows of a run."""
        chosen = {key.replace("_", " "): value for key, value in chosen.items()} | {"run": run}
        rows = self.files[file]
        return [
            float(row[column])
            for row in rows
            if all(row[key] == value for key, value in chosen.items())
        ]

    def layers(self, run, step, measure):
        """Return means over seeds, by layer."""
        return [
            numpy.mean(found)
            for n in range(1, 13)
            if (found := self.values("measures", run, "value", step=str(step), measure=measure,
                                     part=f"layer {n}"))
        ]  # fmt: skip

    def last(self, run):
        return max(step for _, name, step in self.losses if name == run)

    def gap(self, run, step, other, at, band=None):
        """Return the gap in all positions or in a band."""
        found = self.sessions
        if band:
            found = [
                dataclasses.replace(
                    each, rows={n: [r for r in rows if r.get("band", band) == band]
                                for n, rows in each.rows.items()},
                )
                for each in found
            ]  # fmt: skip
        return self._gap_of(found, run, step, other, at)

    def cell(self, column, run, step, other, at):
        """Return the text of a cell."""
        if column in ("0-1024", "1024-4096", "4096-8192"):
            gap = self.gap(run, step, other, at, column)
            return f"{gap.value:+.4f} ± {gap.over_documents:.4f}"
        if column in ("gap", "difference", "in %", "± documents", "± seeds", "seeds"):
            digits = 5 if column == "difference" else 4
            gap = self.gap(run, step, other, at)
            if gap is None:
                return ""
            return {
                "gap": f"{gap.value:+.4f}",
                "difference": f"{gap.value:+.{digits}f} ± {gap.over_documents:.{digits}f}",
                "in %": f"{gap.value / gap.reference:+.2%}".replace("%", " %"),
                "± documents": f"{gap.over_documents:.4f}",
                "± seeds": f"{gap.over_seeds:.4f}" if gap.seeds > 1 else "",
                "seeds": str(gap.seeds),
            }[column]
        if column == "losses":
            found = (self.losses.get((seed, run, step)) for seed in "12")
            return ", ".join(f"{loss:.4f}" for loss in found if loss)
        if column in ("mass", "recall", "indexer KL"):
            of_layers = self.layers(run, step, column)
            digits = 2 if column == "recall" else 3
            return f"{numpy.mean(of_layers):.{digits}f}" if of_layers else ""
        if column == "mass, layer 1":
            return f"{found[0]:.2f}" if (found := self.layers(run, step, "mass")) else ""
        if column == "K/S":
            keys = re.fullmatch(r"sparse(?:_(\d+))?(?:_\D+)?", run)
            return f"1/{8192 // int(keys[1] or 2048)}" if keys else ""
        return self.of_times(column, run)

    def of_times(self, column, run):
        """Return the text of a cell of the table of times; of runs of both seeds, of seed 1, 2."""
        if column == "ms per step":
            of_seeds = (self.values("training", run, "milliseconds", seed=seed) for seed in "12")
            return ", ".join(f"{numpy.median(each):.0f}" for each in of_seeds if each)
        if column == "peak GiB":
            return f"{max(self.values('measures', run, 'value', measure='peak memory')):.2f}"
        name, digits = {"run, s": ("seconds", 0), "evaluation, s": ("evaluation_seconds", 0)}[
            column
        ]
        return ", ".join(f"{each:.{digits}f}" for each in self.values("runs", run, name))

    def table(self, lines):
        """Yield every row of a table: as it should be, and as it is."""
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        for row in rows:
            cells = dict(zip(header, row, strict=True))
            run = cells["run"].strip("`")
            step = int(cells.get("step") or self.last(run))
            to = re.match(r"`(\w+)`(?:, (\d+))?", cells.get("to", ""))
            other, at = (to[1], int(to[2] or step)) if to else ("dense_on", step)
            kept = ("run", "step", "to")
            if "to" in header and not to:
                kept += ("gap", "in %", "± documents", "± seeds", "seeds")
            found = {
                name: text if name in kept else self.cell(name, run, step, other, at)
                for name, text in cells.items()
            }
            yield found, cells


def tables(text):
    """Yield the lines of every table."""
    for block in re.findall(r"(?:^\|.*\|$\n)+", text, re.M):
        yield block.splitlines()


def percent(gap):
    return f"{100 * gap.value / gap.reference:.2f} %"


def said(on_gpu):
    """Yield figures in the sentences of the page, as they have to be."""
    gap = on_gpu.gap
    dense, fewer = (gap(run, 1020, "dense_on", 1020) for run in ("sparse", "sparse_1024"))
    yield (
        f"**{percent(dense)} higher** ({dense.value:+.4f} nats per token ± "
        f"{dense.over_documents:.4f} over documents, ± {dense.over_seeds:.4f} over two seeds)"
    )
    yield (
        f"{percent(fewer)} higher ({fewer.value:+.4f} ± {fewer.over_documents:.4f} "
        f"± {fewer.over_seeds:.4f})"
    )
    equal = [gap(run, 1020, "dense_on", 960) for run in ("sparse", "sparse_1024")]
    yield f"the gap is {percent(equal[0])} and {percent(equal[1])}"
    losses = [on_gpu.losses[seed, "dense", 840] for seed in "12"]
    tokens = 840 * 4 * 8192 / 1e6
    yield f"saw {tokens:.1f} M tokens and has a loss of {numpy.mean(losses):.1f} nats per token"
    brought = gap("dense_on", 1020, "dense_on", 960)
    yield f"a frozen warm-up leaves out ({-brought.value:.4f})"
    yield f"lower the loss by {percent(brought).removeprefix('-')} here"
    one_seed = [gap(run, 1020, "dense_on", 1020) for run in ("sparse_512", "sparse_256")]
    yield f"(one seed) the gap is {percent(one_seed[0])} and {percent(one_seed[1])}"
    keys = [gap(f"sparse_{keys}", 1020, "sparse", 1020) for keys in (1024, 512, 256)]
    yield f"1/8 is {percent(keys[0])} above 1/4"
    yield f"1/16 and 1/32 are {percent(keys[1])} and {percent(keys[2])} above it"

    again = [gap("dense_on_again", step, "dense_on", step) for step in (900, 960, 1020)]
    again_sparse = [gap("sparse_again", step, "sparse", step) for step in (960, 1020)]
    largest = [max(abs(each.value) for each in found) for found in (again, again_sparse)]
    yield f"differ by up to {largest[0]:.5f} dense and {largest[1]:.5f} sparse"
    absorbed = gap("sparse_absorbed", 960, "sparse", 960)
    yield f"differ by {abs(absorbed.value):.5f} at step 960"
    assert abs(absorbed.value) < largest[1]
    fp8 = [gap("sparse_fp8_scores", step, "sparse", step).value for step in (960, 1020)]
    yield f"differs by {fp8[0]:+.5f} and {fp8[1]:+.5f}"
    assert 1.5 < fp8[0] / again_sparse[0].value < 2.5 and abs(fp8[0]) < keys[0].value

    early = [gap("sparse_256", 1020, "dense_on", 1020, band).value
             for band in ("0-1024", "4096-8192")]  # fmt: skip
    yield f"from {early[0]:+.4f} in the first 1024 tokens to {early[1]:+.4f} in the second half"
    mass, best = ([on_gpu.layers(run, 1020, measure) for run in ("sparse", "sparse_256")]
                  for measure in ("mass", "best mass"))  # fmt: skip
    yield (
        f"{mass[0][0]:.2f} of it with K/S = 1/4 and {mass[1][0]:.2f} with 1/32, the best K keys "
        f"{best[0][0]:.2f} and {best[1][0]:.2f}; layers 11 and 12 come next ({mass[1][10]:.2f} "
        f"and {mass[1][11]:.2f} with 1/32)"
    )
    selecting = {row["run"] for row in on_gpu.files["measures"] if row["measure"] == "mass"}
    for run in selecting:
        assert numpy.argmin(on_gpu.layers(run, on_gpu.last(run), "mass")) == 0, run
    assert set(numpy.argsort(mass[1])[:3]) == {0, 10, 11}
    wide, narrow = (on_gpu.layers(run, 1020, "recall") for run in ("sparse", "sparse_256"))
    least = numpy.argmin(narrow)
    yield f"Recall is least in layer {least + 1} with K/S = 1/32 ({narrow[least]:.2f})"
    yield f"with 1/4 it is {min(wide):.2f} to {max(wide):.2f} in all layers"
    high, low = map(numpy.mean, mass)
    most = numpy.mean(best[0])
    yield (
        f"low ({numpy.mean(wide):.2f} with K/S = 1/4) where mass is high ({high:.3f}; "
        f"the best K keys have {most:.3f})"
    )
    # Selected keys that are not among the best have at most what is left of all attention.
    assert most - high < 0.012 and 1 - most < 0.002
    yield f"as it falls from {high:.3f} to {low:.3f}"

    seconds = {(row["seed"], row["run"]): int(row["seconds"]) for row in on_gpu.files["runs"]}
    yield f"The {len(seconds)} runs took {sum(seconds.values()) / 3600:.2f} GPU hours"
    default = ("dense", "dense_on", "warmup", "sparse", "sparse_1024", "sparse_without_warmup")
    each = [sum(seconds[seed, run] for run in default) for seed in "12"]
    yield f"took {each[0]} s (seed 1) and {each[1]} s (seed 2)"
    yield f"GPU30=1 examples/conversion/all.sh # {each[0] / 60:.0f} minutes on one H200"
    evaluations = [on_gpu.of_times("evaluation, s", run)
                   for run in ("sparse_absorbed", "sparse", "sparse_256")]  # fmt: skip
    yield "took {} s against {} s, and of `sparse_256` {} s".format(
        evaluations[0], evaluations[1].split(", ")[0], evaluations[2]
    )
    yield f"(peak of `sparse` on the H200: {on_gpu.of_times('peak GiB', 'sparse')} GiB)"

    without = {step: gap("sparse_without_warmup", step, "dense_on", step) for step in (900, 1020)}
    yield f"smaller at equal tokens ({percent(without[1020])})"
    yield f"larger at equal updates ({percent(without[1020])} against {percent(equal[0])})"
    first, later = (
        sorted(on_gpu.values("training", "sparse_without_warmup", "mass", step=step))
        for step in ("841", "900")
    )
    yield (
        f"{first[0]:.2f} to {first[1]:.2f} of the attention in the first step, {later[0]:.2f} "
        f"to {later[1]:.2f} after 60, and the gap is {percent(without[900])} there"
    )
    right = {True: [], False: []}
    for run in {name for _, name, _ in on_gpu.losses}:
        for part in ("1024", "2048", "4096", "7168", "none"):
            chosen = {"step": str(on_gpu.last(run)), "part": part}
            right[part == "none"] += on_gpu.values(
                "measures", run, "value", measure="copy", **chosen
            )
            assert not any(on_gpu.values("measures", run, "value", measure="look-up", **chosen))
    yield (
        f"right in {min(right[False]):.2f} to {max(right[False]):.2f} of cases and guesses without "
        f"the passage in {min(right[True]):.2f} to {max(right[True]):.2f}"
    )
    bands = [
        [on_gpu.values("measures", "dense_on", column, step="1020", measure="loss", part=band)
         for band in ("0-1024", "1024-4096", "4096-8192")]
        for column in ("value", "error")
    ]  # fmt: skip
    yield "has {:.3f}, {:.3f} and {:.3f} (mean".format(*numpy.mean(bands[0], 1))
    yield f"of {numpy.min(bands[1]):.2f} to {numpy.max(bands[1]):.2f}."


@pytest.fixture(scope="module")
def on_gpu():
    return OnGPU()


def test_the_page_has_the_figures_of_the_runs_on_a_gpu(on_gpu):
    """Every cell of its tables."""
    runs, columns = set(), set()
    for lines in tables(section("Results")):
        for expected, written in on_gpu.table(lines):
            assert written == expected
            runs.add(written["run"].strip("`"))
            columns |= set(written)
    assert runs == {run for _, run, _ in on_gpu.losses}
    assert {"gap", "± documents", "± seeds", "mass", "difference", "4096-8192", "run, s"} <= columns


def test_the_page_says_what_follows_from_its_tables(on_gpu):
    """Figures in its sentences."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for figure in said(on_gpu):
        assert " ".join(figure.split()) in text, figure


def test_runs_on_a_gpu_have_the_whole_held_out_set(on_gpu):
    """Losses of documents are of 148 sequences, and are those that Megatron logged."""
    for session in on_gpu.sessions:
        for run, steps in session.documents.items():
            for step, sums in steps.items():
                tokens = sum(n for _, n in sums.values())
                assert tokens == 148 * 8192
                mean = sum(loss for loss, _ in sums.values()) / tokens
                assert mean == pytest.approx(on_gpu.losses[str(session.seed), run, step], abs=2e-5)


def test_the_page_has_the_figures_of_the_csv():
    """Losses of three seeds, and their gaps to ``dense_on`` with the mean and standard error."""
    losses = {}
    with open(FOLDER / "small_cpu.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["run"], int(row["step"]))
            losses.setdefault(key, {})[row["seed"]] = float(row["validation_loss"])
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| ([\d., ]+) \| (?:`dense_on`, (\d+)[\w, ]* \| (\S+) ± (\S+))?",
        section("The small version"), re.M,
    )  # fmt: skip
    assert {name for name, *_ in rows} == set(RUNS)
    assert sum(bool(against) for *_, against, _, _ in rows) >= 4
    for name, step, written, against, mean, error in rows:
        curve = losses[name, int(step)]
        assert written == ", ".join(f"{curve[seed]:.3f}" for seed in "123")
        if against:
            reference = losses["dense_on", int(against)]
            gaps = numpy.array([curve[seed] - reference[seed] for seed in "123"])
            assert mean == f"{gaps.mean():+.3f}"
            assert error == f"{gaps.std(ddof=1) / 3**0.5:.3f}"
