"""Print the files of this package that the forward of one attention layer passes through.

    python scripts/visited_files.py                 # of this clone
    python scripts/visited_files.py --root OLD      # of another checkout

Trains two tiny models for two steps on the CPU, one of DSA and one of CSA layers, and lists the
files with a function that runs in the last forward of a layer. Omitted are files that all others
use (``errors``, ``ops/common``; in older checkouts ``numerics``, ``checks``, ``ops/arithmetic``),
the CPU host, and metrics of the selection, which run once per iteration.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --normalization
RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --seq-length 64
--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --lr 1e-3
--eval-iters 0 --eval-interval 1000 --attention-backend dsa_fused --mock-data --tokenizer-type
NullTokenizer --vocab-size 257 --num-workers 0 --qk-layernorm --dsa-indexer-n-heads 4
--dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-health-tokens 0 --dsa-indexer-loss-coeff 1
--dsa-indexer-use-sparse-loss --rope-type rope --position-embedding-type rope
"""
LAYERS = {
    "DSA": "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16",
    "CSA": "--multi-latent-attention --q-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 24 --csa-compress-ratios 4 4 --csa-window-size 8 --o-groups 2 --o-lora-rank 16 "
    "--csa-compress-rotary-base 10000 --dsa-indexer-rope-interleaved",
}
LEFT_OUT = (
    "errors.py",
    "checks.py",
    "ops/common",
    "ops/arithmetic.py",
    "ops/autograd.py",
    "cpu_host.py",
    "patches",
)


def visit(kind: str) -> None:
    """Train in this process and print the visited files, one per line."""
    import runpy

    package = str(Path.cwd() / "megatron_dsa") + os.sep
    visited: set[str] = set()

    def note(frame, event, _argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name != "<module>":
            visited.add(code.co_filename.removeprefix(package))

    import megatron_dsa.pretrain as entry

    entry.prepare_host(sys.argv)
    from megatron.core.transformer.transformer_layer import TransformerLayer

    forward = TransformerLayer._forward_attention

    def traced(self, *args, **kwargs):
        visited.clear()
        sys.setprofile(note)
        try:
            return forward(self, *args, **kwargs)
        finally:
            sys.setprofile(None)

    TransformerLayer._forward_attention = traced
    sys.argv = ["pretrain", *(COMMON + LAYERS[kind]).split()]
    try:
        runpy.run_module("megatron_dsa.pretrain", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    Path(os.environ["VISITED"]).write_text(
        "\n".join(sorted(path for path in visited if not path.startswith(LEFT_OUT)))
    )


def main() -> None:
    """Read the command line; train each kind of layer in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--visit", choices=LAYERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.visit:
        visit(options.visit)
        return
    root = options.root.resolve()

    for kind in LAYERS:
        with tempfile.NamedTemporaryFile("r") as listing:
            environment = os.environ | {"PYTHONPATH": str(root), "VISITED": listing.name}
            environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
            command = [
                sys.executable,
                "-W",
                "ignore",
                str(Path(__file__).resolve()),
                "--visit",
                kind,
            ]
            run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
            files = listing.read().splitlines()
        if not files:
            sys.exit(f"the {kind} model could not be trained:\n{(run.stdout + run.stderr)[-3000:]}")
        print(f"forward of one {kind} layer: {len(files)} files")
        print("\n".join(f"  {file}" for file in files))


if __name__ == "__main__":
    main()
