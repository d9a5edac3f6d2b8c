"""Command ``evaluate``: loss and perplexity of a trained model over a data set."""

import argparse
import contextlib
import io
import math

from megatron.core.utils import get_model_config
from megatron.training import training

from megatron_dsa.errors import require
from megatron_dsa.extras.generate.trained_model import TrainedModel, trained_model
from megatron_dsa.training.data import check_prefixes, train_valid_test_datasets
from megatron_dsa.training.data_files import check_data_set
from megatron_dsa.training.setup import forward_step


def run(arguments: argparse.Namespace) -> int:
    flags = None
    if arguments.data_path is not None:
        flags = ["--data-path", arguments.data_path, "--split", "0,100,0", "--full-validation"]
        flags += ["--eval-global-batch-size", "1", "--eval-micro-batch-size", "1"]
        flags += ["--eval-interval", "1"]
    with trained_model(arguments.load, arguments.step, flags) as trained:
        args = trained.args
        if arguments.data_path is not None and not args.dsa_sft:
            check_prefixes([arguments.data_path])
            tokens = check_data_set(arguments.data_path)
            require(
                tokens > args.seq_length,
                f"--data-path {arguments.data_path} must have more tokens than a sequence of the "
                f"training ({args.seq_length}), got {tokens}: give a longer text",
            )
        require(
            args.full_validation or args.eval_iters,
            f"--load {arguments.load}: its training did not evaluate (--eval-iters 0): give "
            "--data-path PREFIX of an indexed data set",
        )
        for name, sequences, loss in losses(trained):
            print(
                f"step {trained.step}, {name}, {sequences} sequences of {args.seq_length} tokens: "
                f"loss {loss:.6f}, perplexity {math.exp(loss):.6g}"
            )
    return 0


def losses(trained: TrainedModel) -> list[tuple[str, int, float]]:
    """Return name, number of sequences and loss per token of every data set.

    Without ``--full-validation``, evaluate the sequences of the training's first evaluation.
    """
    args, model, found = trained.args, trained.chunks, []
    with contextlib.redirect_stdout(io.StringIO()):
        _, valid, _ = training.build_train_valid_test_data_iterators(train_valid_test_datasets)
        several = args.multiple_validation_sets
        iterators = valid if several else [valid]
        batches = args.eval_iters if several else [args.eval_iters]
        for number, (iterator, count) in enumerate(zip(iterators, batches, strict=True)):
            result, _, _ = training.evaluate(
                forward_step, iterator, model, None, get_model_config(model[0]), eval_iters=count
            )
            name = f"validation set {number}" if several else _named(args)
            found.append((name, count * args.eval_global_batch_size, result["lm loss"].item()))
    return found


def _named(args: argparse.Namespace) -> str:
    if args.mock_data or not args.data_path:
        return "validation data"
    part = "all" if args.full_validation else f"validation part of --split {args.split}"
    return f"{' '.join(args.data_path)} ({part})"
