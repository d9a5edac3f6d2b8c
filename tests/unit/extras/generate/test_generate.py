"""``generate``: text of a model, independent of padding."""

import argparse
import contextlib

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.generate import generate as command
from megatron_dsa.extras.generate.generate import Bytes, Ids, codec_of, generate, next_logits
from megatron_dsa.training import data
from tests.helpers import relative_error
from tests.host import small_config, small_csa_config, start

VOCABULARY, LENGTH = 64, 150


@pytest.fixture(scope="module", params=["dsa", "csa"])
def model(request):
    """Return a small model of all kinds of layers, in float64."""
    device = start()
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_dsa.specs import dsa_block_spec

    config = small_config() if request.param == "dsa" else small_csa_config(4)
    if request.param == "csa":
        config = small_csa_config(4, num_layers=4, csa_compress_ratios=[0, 4, 16, 4])
    gpt = GPTModel(
        config, dsa_block_spec(config), VOCABULARY, LENGTH, position_embedding_type="rope"
    )
    return gpt.to(device).eval()


def prompt_of(length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def logits_of(model, ids):
    """Return all logits ``[s, vocabulary]`` of an unpadded sequence."""
    tokens = torch.tensor(ids, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        return model(tokens, torch.arange(len(ids), device=tokens.device)[None], None)[0].float()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 149])
def test_padding_changes_no_token_before_it(model, length, monkeypatch):
    ids = prompt_of(length)
    expected = logits_of(model, ids)[-1]
    for lengths in (1, 7, 64, 1000):
        monkeypatch.setattr(command, "LENGTHS", lengths)
        assert relative_error(next_logits(model, ids, LENGTH), expected) < 1e-6
    # A change of the last real token must be noticed.
    other = [*ids[:-1], (ids[-1] + 1) % VOCABULARY]
    assert relative_error(next_logits(model, other, LENGTH), expected) > 1e-3


def test_greedy_text_has_the_most_probable_tokens(model):
    prompt = prompt_of(60)
    new = generate(model, prompt, 8, vocabulary=VOCABULARY, end=-1, maximum=LENGTH)
    best = logits_of(model, [*prompt, *new]).argmax(-1)
    assert new == best[len(prompt) - 1 : -1].tolist() and len(new) == 8


def test_text_ends_at_the_end_of_a_document(model):
    prompt = prompt_of(20)
    settings = {"vocabulary": VOCABULARY, "maximum": LENGTH}
    new = generate(model, prompt, 6, end=-1, **settings)
    stop = new.index(new[2])
    assert generate(model, prompt, 6, end=new[2], **settings) == new[:stop]


def test_rows_of_padding_are_no_tokens(model):
    prompt = prompt_of(20)
    best = int(next_logits(model, prompt, LENGTH).argmax())
    limit = max(best, 1)
    (token,) = generate(model, prompt, 1, vocabulary=limit, end=-1, maximum=LENGTH)
    assert token < limit


def test_drawing_follows_seed_and_temperature(model):
    prompt = prompt_of(20)

    def drawn(seed, temperature):
        generator = torch.Generator().manual_seed(seed)
        return generate(
            model, prompt, 12, vocabulary=VOCABULARY, end=-1, maximum=LENGTH,
            temperature=temperature, generator=generator,
        )  # fmt: skip

    assert drawn(1, 1.0) == drawn(1, 1.0) != drawn(2, 1.0)
    greedy = generate(model, prompt, 12, vocabulary=VOCABULARY, end=-1, maximum=LENGTH)
    assert drawn(1, 1e-6) == greedy != drawn(1, 1.0)


def test_texts_that_are_too_long_are_refused(model):
    prompt = prompt_of(LENGTH - 3)
    settings = {"vocabulary": VOCABULARY, "end": -1, "maximum": LENGTH}
    assert len(generate(model, prompt, 3, **settings)) == 3
    with pytest.raises(ConfigError, match=r"--tokens 4 behind a prompt of 147 .* 3 at most"):
        generate(model, prompt, 4, **settings)


def test_bytes_are_the_tokens_of_prepared_data():
    codec = codec_of(argparse.Namespace(tokenizer_type="NullTokenizer", vocab_size=257))
    assert isinstance(codec, Bytes)
    text = "für alle\n"
    assert codec.decode([*codec.encode(text), 256]) == text
    assert codec.decode(codec.encode(text)[:2]) == "f\N{REPLACEMENT CHARACTER}"  # half of a letter


def test_other_numbers_are_ids(monkeypatch):
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    monkeypatch.setattr(command, "get_tokenizer", lambda: tokenizer)
    tokenizer = NullTokenizer(1024)
    codec = codec_of(argparse.Namespace(tokenizer_type="NullTokenizer", vocab_size=1024))
    assert isinstance(codec, Ids) and codec.end == 1023
    assert codec.decode(codec.encode("5 1000 7")) == "5 1000 7"
    for prompt in ("the class", "5 1024", "5 -1"):
        with pytest.raises(ConfigError, match="is no token id below 1024"):
            codec.encode(prompt)


def test_a_text_is_printed_on_a_line():
    assert command._on_a_line("für\n\x00 \\ a") == "für\\n\\x00 \\ a"


@pytest.mark.parametrize("told, least", [(300, 257), (None, 257)])
def test_prompts_of_another_tokenizer(told, least, monkeypatch, tmp_path):
    args = argparse.Namespace(vocab_size=told, tokenizer_type="HuggingFaceTokenizer")
    tokenizer = argparse.Namespace(vocab_size=least, eod=0, tokenize=lambda text: [1, int(text)])
    model = argparse.Namespace(args=args, directory="there", chunks=[torch.nn.Linear(1, 1)])
    monkeypatch.setattr(command, "get_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(data, "get_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(command, "trained_model", lambda *_, **__: contextlib.nullcontext(model))
    vocabulary = max(told or 0, least)
    with pytest.raises(ConfigError, match=f"holds the token {vocabulary}, .* has {vocabulary} tok"):
        main(["generate", "--load", str(tmp_path), "--prompt", str(vocabulary)])
