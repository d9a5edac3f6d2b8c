"""Former identifiers do not come back (``docs/design/glossary.md`` says what replaced them)."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_dsa"

#: Identifiers of former versions -> the word now.
FORMER = {
    r"(device|index|dense)_problem|\w*Problem": "describe_call, OpCall, ...Inputs",
    r"Hybrid(SelfAttention|CoreAttention|TransformerConfig)\w*": "CSA...",
    r"is_hybrid": "uses_csa",
    r"Window": "QueryRange",
    r"Spread|spread_layout": "Sharding, sharded_layout",
    r"KeyPlaces|key_places|places_of": "KeyOwnership, global_positions_of",
    r"everywhere|all_rows|real_rows": "global_layout, all_tokens, real_tokens",
    r"(Zigzag|Contiguous|Packed|PackedZigzag|Unpacked)?Rows|ring_rows": "TokenShard, token_shard",
    r"by_rows|to_rows|to_heads|RowRope": "by_sequence, heads_to_sequence, TokenRope",
    r"arrive|arrive_with_gradient|channel_for": "finish_with_proxy, grad_proxy_for",
    r"settle|settling|unsettled": "resolve_kernels, without_kernels",
    r"[Rr]ehears\w*|stand_ins?|Silent|Tally|tally": "meta functions, MemoryTracker",
    r"leads|untried": "first, never_run",
    r"judge[sd]_\w+": "evaluates_indexer_now, samples_selection",
    r"needs_indexer_backward|ring_latent_attention|ring_rows": "gone",
}
#: Megatron's names.
ALLOWED = {"is_hybrid_cp"}


def identifiers(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME} - ALLOWED


@pytest.mark.parametrize("pattern", FORMER)
def test_former_words_are_gone(pattern):
    found = [
        f"{path.relative_to(PACKAGE)}: {name}, now {FORMER[pattern]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in identifiers(path)
        if re.fullmatch(pattern, name)
    ]
    assert not found


def test_a_problem_is_a_complaint():
    complaints = {"versions.py", "ops/dispatch/packages.py", "extras/cli.py", "extras/info.py"}
    complaints |= {"ops/dispatch/support.py"}  # Package.problem
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"\bproblems?\b(?!\()", text)
        assert not found or place in complaints, place


def prose(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return comments + [found for node in nodes if (found := ast.get_docstring(node))]


def test_sentences_are_plain():
    pattern = re.compile(r"\b[Nn]obody\b|\b[Ww]hoever\b|(?:^|[.:#] )Of\b")
    found = [
        f"{path.relative_to(PACKAGE)}: {text[:80]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in prose(path)
        if pattern.search(text)
    ]
    assert not found
