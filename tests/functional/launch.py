"""The training entry point in its own processes, and its parsed log."""

import functools
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore

from tests.processes import REPOSITORY, Lost, python_path, run_modules, run_without_a_rank
from tests.trainer import Trainer

ENTRY_POINT = "megatron_dsa.pretrain"
LIMIT = 600  # seconds

#: A DeepSeek-V3.2 in miniature, the base of every case. ``True`` is a bare flag.
TINY = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 96,
    "--num-attention-heads": 4,
    "--multi-latent-attention": True,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 32,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
    "--qk-layernorm": True,
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
    "--rope-type": "rope",
    "--position-embedding-type": "rope",
    "--untie-embeddings-and-output-weights": True,
    "--attention-backend": "dsa_fused",
    "--dsa-indexer-n-heads": 4,
    "--dsa-indexer-head-dim": 16,
    "--dsa-indexer-topk": 16,
    "--dsa-indexer-loss-coeff": 1.0,
    "--dsa-indexer-loss-queries": 1.0,
    "--dsa-indexer-use-sparse-loss": True,
    "--seq-length": 96,
    "--max-position-embeddings": 96,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--lr": 3e-3,
    "--min-lr": 3e-3,
    "--lr-decay-style": "constant",
    "--weight-decay": 0.0,
    "--clip-grad": 0.0,
    "--adam-beta2": 0.95,
    "--train-iters": 4,
    "--eval-iters": 0,
    "--eval-interval": 1000,
    "--log-interval": 1,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 257,
    # The automatic padding depends on the tensor-parallel size.
    "--padded-vocab-size": 264,
    "--split": "100,0,0",
    "--seed": 7,
    "--init-method-std": 0.06,
    "--num-workers": 0,
}


#: config.json of a dense DeepSeek-V3 of :data:`TINY`'s shape.
DENSE = {
    "model_type": "deepseek_v3",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 96,
    "torch_dtype": "float32",
}
#: The same with :data:`TINY`'s indexers.
SPARSE = DENSE | {
    "model_type": "deepseek_v32",
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 16,
}


@dataclass
class Run:
    """Printed output of a training run."""

    returncode: int
    log: str
    steps: list[dict[str, float]] = field(default_factory=list)

    def column(self, name: str) -> list[float]:
        """Return a logged figure over all iterations."""
        return [step[name] for step in self.steps]


def parse_steps(log: str) -> list[dict[str, float]]:
    """Return the figures of every ``iteration N/M | name: value | ...`` line."""
    steps = []
    for line in log.splitlines():
        match = re.search(r"iteration +(\d+)/", line)
        if not match or "|" not in line:
            continue
        figures = {"iteration": float(match.group(1))}
        for part in line.split("|")[1:]:
            name, _, value = part.rpartition(":")
            try:
                figures[name.strip()] = float(value)
            except ValueError:
                continue
        steps.append(figures)
    return steps


def command_line(flags: dict) -> list[str]:
    """Turn ``{"--flag": value}`` into arguments; ``None`` and ``False`` drop a flag."""
    out = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        out.append(flag)
        if value is not True:
            out += map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return out


def flags_in(text: str) -> dict:
    """Parse printed flags to :func:`launch`'s form."""
    flags: dict = {}
    name = None
    for item in text.split():
        if item.startswith("--"):
            name = item
            flags[name] = True
        else:
            flags[name] = [*flags[name], item] if isinstance(flags[name], list) else [item]
    return flags


def train(changes: dict | None = None, **settings) -> Run:
    """Train with :data:`TINY` plus ``changes``; see :func:`launch` for ``settings``."""
    return launch(TINY | (changes or {}), **settings)


def launch(
    flags: dict,
    *,
    ranks: int = 1,
    check: bool = True,
    env: dict | None = None,
    module: str = ENTRY_POINT,
    as_users_do: bool = False,
    one_process: bool = False,
    kill_at: str | None = None,
) -> Run:
    """Train with ``flags`` in ``ranks`` local processes; return the parsed log.

    ``check``: raise with the end of a failed run's log. ``module``: run it instead.
    ``one_process``: use the shared process, for one rank. ``as_users_do``: start interpreters,
    several ranks by torchrun. ``kill_at``: kill all (forked) processes once this text is logged.
    """
    flags = command_line(flags)
    environment = _environment() | (env or {})
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        if as_users_do:
            status = _start_interpreters(module, flags, environment, ranks, log.name)
        elif one_process:
            assert ranks == 1 and kill_at is None
            status = _in_one_process(module, flags, environment, log.name)
        else:
            status = _fork(module, flags, environment, ranks, log.name, kill_at)
        text = log.read()
    run = Run(status, text, parse_steps(text))
    if check and run.returncode != 0:
        raise AssertionError(f"training failed ({' '.join(flags)}):\n{run.log[-6000:]}")
    return run


def _environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


# All take a free port on opening; a port looked up before may be taken.


def _start_interpreters(module, flags, environment, ranks, log) -> int:
    if ranks == 1:
        # The launcher would double the time.
        environment |= _place(0, 1) | {"MASTER_PORT": "0"}
        launcher = [sys.executable]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks)]
    with open(log, "a") as file:
        return subprocess.run(
            [*launcher, "-m", module, *flags],
            env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT, cwd=REPOSITORY,
        ).returncode  # fmt: skip


def _store() -> tuple[TCPStore, dict[str, str]]:
    """Return a launcher's rendezvous: a store that outlives ranks, and its address."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store, variables | {"TORCHELASTIC_RESTART_COUNT": "0"}


@functools.cache
def shared_trainer() -> Trainer:
    """Return the process shared by runs."""
    return Trainer()


def _in_one_process(module, flags, environment, log) -> int:
    store, variables = _store()
    environment |= variables | _place(0, 1)
    status = shared_trainer().run(module, flags, environment, REPOSITORY, Path(log), LIMIT)
    del store  # must outlive the run
    return status


def _fork(module, flags, environment, ranks, log, kill_at) -> int:
    store, variables = _store()
    environment |= variables
    places = [environment | _place(rank, ranks) for rank in range(ranks)]
    status = run_modules(module, flags, places, REPOSITORY, Path(log), LIMIT, kill_at)
    del store
    return status


def train_without_a_rank(flags: dict, ranks: int, lost: Lost) -> tuple[list[int | None], Run]:
    """Train with :data:`TINY` plus ``flags`` and lose a rank, without a launcher that notices.

    Returns:
        Exit statuses of the other ranks (see :func:`tests.processes.run_without_a_rank`), and the
            log.
    """
    store, variables = _store()
    places = [_environment() | variables | _place(rank, ranks) for rank in range(ranks)]
    arguments = command_line(TINY | flags)
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        statuses = run_without_a_rank(
            ENTRY_POINT, arguments, places, REPOSITORY, Path(log.name), lost
        )
        text = log.read()
    del store
    return statuses, Run(max((x or 0 for x in statuses), key=abs), text, parse_steps(text))


def _place(rank: int, ranks: int) -> dict[str, str]:
    local = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    return local | {"MASTER_ADDR": "localhost"}
