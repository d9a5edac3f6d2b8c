"""The verification cards say all they have to, and no figure that their source does not have."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "docs/cards"
CARDS = sorted(set(FOLDER.glob("*.md")) - {FOLDER / "README.md"})
STATUSES = {"verified", "compiled, not run", "not verified"}
FIELDS = [
    "command",
    "hardware",
    "versions",
    "precision",
    "first and last loss",
    "step time",
    "peak memory",
    "resume",
]


def rows(card):
    """Return ``{field: (status, text)}`` of a card."""
    found = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", card.read_text(), re.M)
    return {field: (status, text) for field, status, text in found}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_card_is_complete(card):
    found = rows(card)
    assert list(found)[: len(FIELDS)] == FIELDS
    assert {status for status, _ in found.values()} <= STATUSES
    assert f"({card.name})" in (FOLDER / "README.md").read_text()
    assert "```bash\n" in card.read_text()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_figures_are_in_their_source(card):
    for field, (status, text) in rows(card).items():
        if status != "verified":
            assert not re.search(r"\d+\.\d", text), f"{field}: a figure that is not verified"
            continue
        targets = re.findall(r"\]\(([^)#]+)", text)
        assert targets, f"{field}: no source"
        sources = "".join((FOLDER / target).read_text() for target in targets)
        for figure in re.findall(
            r"(?<![\w.])\d+\.\d+(?:\.\d+)?(?:\+\w+)?", re.sub(r"\(.*?\)", "", text)
        ):
            # As a whole: not the end or the beginning of another one.
            whole = rf"(?<![\d.]){re.escape(figure)}(?!\d)"
            assert re.search(whole, sources), f"{field}: {figure} is not in {targets}"
