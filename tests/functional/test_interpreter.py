"""Scripts that get forked processes for ``python`` see what a started one would show them."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
print(sys.argv, os.getcwd(), os.environ.get("GIVEN"), __name__, sys.path[0])
print("said to stderr", file=sys.stderr)
if sys.argv[1] == "wait":
    print("waiting", flush=True)
    time.sleep(60)
if sys.argv[1] == "fail":
    raise ValueError("failed")
sys.exit({"sentence": "a sentence", "number": 7}.get(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def outcome(interpreter, folder, *arguments):
    """What a process shows: streams, without the frames of a traceback, and exit status."""
    done = subprocess.run(
        [interpreter, *arguments], cwd=folder, env=os.environ | {"GIVEN": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    return done.stdout, said, done.returncode


@pytest.mark.parametrize("way", ["end", "number", "sentence", "fail"])
def test_a_file_ends_as_with_python(python, program, way):
    found = outcome(python, program.parent, program, way, "--more", "x y")
    assert found == outcome(sys.executable, program.parent, program, way, "--more", "x y")
    assert found[2] == {"end": 0, "number": 7}.get(way, 1)
    assert "said to stderr" in found[1]


CHILD = """
import os, sys
print("torch" in sys.modules, os.getcwd() in sys.path, sys.stdin.read())
"""
PARENT = """
import subprocess, sys
for way in (["-P", "child.py"], ["child.py"], ["-m", "child"], ["-P", "-m", "child"]):
    subprocess.run([sys.executable, *way], input="given", text=True)
"""


def test_a_process_that_it_starts_is_forked(python, tmp_path):
    """With its input, and without its folder in the path if it asks for that."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    forked, started = (
        outcome(x, tmp_path, tmp_path / "parent.py")[:2] for x in (python, sys.executable)
    )
    lines = ["False given", "True given", "True given"]
    assert forked[0].splitlines() == [f"True {line}" for line in lines]
    assert started[0].splitlines() == [f"False {line}" for line in lines]
    assert all("No module named child" in said[-1] for _, said in (forked, started))


def test_a_module_and_what_is_neither(python, tmp_path):
    for arguments in (["-m", "platform"], ["-c", "import sys; print(sys.argv, sys.version)", "x"]):
        found = outcome(python, tmp_path, *arguments)
        assert found == outcome(sys.executable, tmp_path, *arguments)
        assert found[0] and found[2] == 0


def test_a_signal_reaches_the_process(python, program):
    with subprocess.Popen([python, program, "wait"], stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline() != "waiting\n":
            pass
        process.terminate()
        assert process.wait(timeout=30) == -signal.SIGTERM
