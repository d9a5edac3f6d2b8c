"""Runner of the functional cases: train with a case's flags, compare with its golden values."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from tests.functional.launch import REPOSITORY, Run, launch

CASES = Path(__file__).parent


def case_names() -> list[str]:
    return sorted(path.parent.name for path in CASES.glob("*/model_config.yaml"))


def load_case(name: str) -> dict:
    return yaml.safe_load((CASES / name / "model_config.yaml").read_text())


def golden_file(name: str) -> Path:
    """Return the golden values of this kind of device: random weights differ between CPU
    and GPU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return CASES / name / f"golden_values_{device}.json"


def prepare_data(folder: str) -> str:
    """Write the byte-level data set of the cases; return its ``--data-path``.

    The text is the project's licence, which is the same on every machine.
    """
    prefix = str(Path(folder) / "license")
    text = str(REPOSITORY / "LICENSE")
    subprocess.run(
        [sys.executable, "-m", "megatron_dsa", "prepare-data", "--output", prefix, "--input", text],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return prefix


def run_case(name: str, data_path: str) -> Run:
    case = load_case(name)
    flags = {
        flag: data_path if value == "${DATA_PATH}" else value
        for flag, value in case["MODEL_ARGS"].items()
    }
    environment = {key: str(value) for key, value in case.get("ENV_VARS", {}).items()}
    return launch(flags, ranks=case["RANKS"], env=environment, as_users_do=True)


def differences(name: str, run: Run) -> list[str]:
    """Compare a run with the case's golden values; return the differences."""
    golden = json.loads(golden_file(name).read_text())
    tolerance = load_case(name)["TOLERANCE"]
    complaints = []
    for figure, expected in golden.items():
        got = run.column(figure)
        if len(got) != len(expected):
            complaints.append(f"{figure}: {len(got)} values, {len(expected)} expected")
            continue
        for step, (a, b) in enumerate(zip(got, expected, strict=True), 1):
            # NaN must count as a difference.
            if not abs(a - b) <= tolerance[figure] * abs(b):
                complaints.append(f"{figure} at step {step}: {a} instead of {b}")
    return complaints


def write_golden(name: str, run: Run) -> None:
    """Store the losses of a run as golden values."""
    golden = {figure: run.column(figure) for figure in load_case(name)["TOLERANCE"]}
    golden_file(name).write_text(json.dumps(golden, indent=1) + "\n")


def main() -> int:
    """Run the command line; return the number of failed cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=case_names())
    parser.add_argument("--update", action="store_true", help="write the golden values anew")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        data_path = prepare_data(folder)
        for name in arguments.cases:
            run = run_case(name, data_path)
            if arguments.update:
                write_golden(name, run)
            complaints = differences(name, run)
            failed += bool(complaints)
            print(f"{name}: {'; '.join(complaints) or 'ok'}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
