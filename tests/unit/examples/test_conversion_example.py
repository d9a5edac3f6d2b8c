"""``examples/conversion``: corpus, flags of full-size runs, table."""

import json
import re

import numpy
import pytest

from tests.cases.conversion import module
from tests.cases.launch_scripts import EXAMPLES, launch
from tests.host import parsed, stop

PAGE = EXAMPLES.parent / "docs/develop/conversion_study.md"


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
        ((3, 4, 5, 6), [[3, 4, 5, 6]]),  # 12, and the rest is added
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
    """Data sets must hold the text in documents with an end id, without overlap."""
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


#: Run -> script, initial run, stage, steps, highest and last rate.
RUNS = {
    "dense": ("dense.sh", None, "dense", 1500, 6e-4, 2e-5),
    "dense_on": ("dense_on.sh", "dense", "dense", 2100, 2e-5, 2e-5),
    "warmup": ("sparse.sh", "dense", "warmup", 1600, 1e-3, 1e-3),
    "sparse": ("sparse.sh", "warmup", "sparse", 2100, 2e-5, 2e-5),
    "sparse_without_warmup": ("sparse_without_warmup.sh", "dense", "sparse", 2100, 2e-5, 2e-5),
    "scratch": ("scratch.sh", None, "sparse", 2100, 6e-4, 2e-5),
}


def trained_to(folder, run, step):
    (folder / run).mkdir(parents=True, exist_ok=True)
    (folder / run / "latest_checkpointed_iteration.txt").write_text(str(step))


def flags_of_run(folder, run, *arguments, **variables):
    """Return a run's flags, given trained predecessors."""
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


#: Changed flags of K/S 1/16 and 1/32, variants, equal runs and V4.
NAMED = {
    "dense_on_again": {"dsa_stage": "dense", "dsa_indexer_topk": 2048},
    "sparse_again": {"dsa_indexer_topk": 2048, "dsa_selected_attention": "auto"},
    "sparse_512": {"dsa_indexer_topk": 512, "dsa_indexer_numerics": "exact"},
    "sparse_256": {"dsa_indexer_topk": 256},
    "sparse_absorbed": {"dsa_indexer_topk": 2048, "dsa_selected_attention": "sparse"},
    "sparse_masked": {"dsa_indexer_topk": 2048, "dsa_selected_attention": "masked"},
    "sparse_fp8_scores": {"dsa_indexer_topk": 2048, "dsa_indexer_numerics": "deepgemm-fp8"},
    "sparse_512_masked": {"dsa_indexer_topk": 512, "dsa_selected_attention": "masked"},
    "v4": {"dsa_indexer_topk": 512, "csa_compress_ratios": [0, 0] + 5 * [4, 128]},
}


def all_runs(folder, *names, **variables):
    """Run ``all.sh`` for these runs, given corpus and predecessors."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/corpus.json").write_text("{}")
    variables = {"RUN_DIR": str(folder), "GPU30": "1"} | variables
    return launch("conversion/all.sh", folder, variables, *names)


@pytest.mark.parametrize("run", NAMED)
def test_named_runs_parse_and_plan(run, tmp_path, monkeypatch, capsys):
    from megatron_dsa.extras.planner.command import dry_run

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
    stop()  # a plan needs its own process groups
    assert dry_run(["pretrain", *flags, "--dsa-dry-run", "--dsa-dry-run-gpu", "h100"]) == 0
    plan = capsys.readouterr().out
    # Only cuDNN's front end has a fused kernel for absorbed attention's teacher.
    assert set(re.findall(r"^  (\w+): torch", plan, re.M)) <= {"sparse_attention_probabilities"}
    weights = float(re.search(r"weights.*\n +0 +(\S+)", plan)[1])
    millions = 157 if run == "v4" else 149 if "dense" in run else 160
    assert weights == pytest.approx(2e6 * millions / 2**30, rel=0.005)


def test_what_is_done_and_what_is_left(tmp_path):
    trained_to(tmp_path, "dense", 420)
    log = "iteration 10 | elapsed time per iteration (ms): {}.0 |\n"
    times = "".join(log.format(value) for value in (900, 500, 400))
    (tmp_path / "dense/train.log").write_text(times)
    done = all_runs(tmp_path, "sparse_512_masked", "dense_on", PLAN="1")
    # Half of dense at 0.5 s a step; process start and evaluations take 65 s.
    assert done.stdout.splitlines() == [
        "== dense: 420 of 840 steps left, about 4.6 minutes",
        "== warmup: 60 of 900 steps left, about 1.8 minutes",
        "== sparse_512_masked: 120 of 1020 steps left, about 2.2 minutes",
        "== dense_on: 180 of 1020 steps left, about 1.9 minutes",
        "== about 10.5 minutes left",
    ]
    trained_to(tmp_path, "dense", 840)
    assert "== dense: done, step 840" in all_runs(tmp_path, PLAN="1").stdout
    assert not (tmp_path / "warmup").exists()


def test_the_page_lists_the_runs(tmp_path):
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
    """They would silently continue checkpoints of another seed."""
    trained_to(tmp_path, "dense", 840)
    assert all_runs(tmp_path, "dense").returncode in (0, 1)
    changes = (
        {"SEED": "2"},
        {"STEPS": "840 60 200"},
        {"TOPK": "1024"},
        {"GPU30": ""},
        {"BATCH": "1"},
        {"RATE": "5e-4"},
        {"LENGTH": "16384"},
    )
    for other in changes:
        done = all_runs(tmp_path, "dense_on", **other)
        assert done.returncode == 2 and "begun with other settings" in done.stderr, other


@pytest.mark.parametrize("length", ["256", "16385"])
def test_sequences_longer_than_documents_are_refused(tmp_path, length):
    done = all_runs(tmp_path, "dense", LENGTH=length)
    assert done.returncode == 2
    assert f"LENGTH must be 512 to 16384, the tokens of a document, got {length}" in done.stderr


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
