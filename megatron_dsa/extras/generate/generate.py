"""Command ``generate``: text generation with one uncached forward pass per token."""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from megatron.training import get_tokenizer

from megatron_dsa.errors import require
from megatron_dsa.extras.generate.trained_model import trained_model
from megatron_dsa.ops.dispatch.choice_log import NO_GPU, log_once
from megatron_dsa.training.data import BYTE_EOD, BYTE_VOCAB, vocabulary_of

#: Pad inputs to multiples of 64 tokens: kernels are built for each length.
LENGTHS = 64


class Bytes:
    """Tokenizer of UTF-8 bytes, see ``prepare-data``."""

    vocabulary, end = BYTE_VOCAB, BYTE_EOD

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")


class Tokenizer:
    """The Megatron tokenizer that the training used."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary, self.end = tokenizer.vocab_size, tokenizer.eod

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.tokenize(text)) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.detokenize([i for i in ids if i != self.end])


class Ids(Tokenizer):
    """Megatron's ``NullTokenizer``: ids separated by blanks."""

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            require(
                word.isascii() and word.isdigit() and int(word) < self.vocabulary,
                f"--prompt: {word!r} is no token id below {self.vocabulary}. The model was trained "
                "with NullTokenizer: give ids, with blanks between",
            )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def codec_of(args: argparse.Namespace) -> Bytes | Tokenizer:
    if args.tokenizer_type != "NullTokenizer":
        return Tokenizer(get_tokenizer())
    return Bytes() if args.vocab_size == BYTE_VOCAB else Ids(get_tokenizer())


@torch.no_grad()
def next_logits(model: Any, ids: Sequence[int], maximum: int) -> torch.Tensor:
    """Return the logits of the token after ``ids``, fp32 ``[padded vocabulary]``.

    ``model`` is a GPT model in evaluation mode that takes up to ``maximum`` tokens.
    """
    padded = min(-(-len(ids) // LENGTHS) * LENGTHS, maximum)
    # Causal attention ignores the padding.
    tokens = torch.zeros(1, padded, dtype=torch.int64)
    tokens[0, : len(ids)] = torch.tensor(ids)
    device = next(model.parameters()).device
    positions = torch.arange(padded, device=device)[None]
    logits = model(tokens.to(device), positions, None)
    return logits[0, len(ids) - 1].float()


def generate(
    model: Any,
    prompt: Sequence[int],
    count: int,
    *,
    vocabulary: int,
    end: int,
    maximum: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue a prompt; return the new token ids, without ``end``.

    Args:
        model: see :func:`next_logits`.
        prompt: token ids, at least one.
        count: tokens to write; fewer if ``end`` comes first.
        vocabulary: upper bound of ids, exclusive.
        end: id that ends the text.
        maximum: the model's context length, including the prompt.
        temperature: 0 takes the most probable token; otherwise sample softmax(logits /
            temperature).
        generator: CPU generator for sampling.
    """
    total, most = len(prompt) + count, max(maximum - len(prompt), 0)
    require(
        total <= maximum,
        f"--tokens {count} behind a prompt of {len(prompt)} makes {total} tokens, and the model "
        f"takes {maximum} (--max-position-embeddings of its training): ask for {most} at most, or "
        "shorten the prompt",
    )
    ids = list(prompt)
    for _ in range(count):
        logits = next_logits(model, ids, maximum)[:vocabulary].cpu()
        if temperature > 0:
            logits = logits.double()  # fp32 overflows at temperatures below 1e-38
            probabilities = torch.softmax((logits - logits.max()) / temperature, 0)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]


def run(arguments: argparse.Namespace) -> int:
    for prompt in arguments.prompt:
        require(
            not any("\ud800" <= c <= "\udfff" for c in prompt),
            f"--prompt {prompt!a} must be text in UTF-8: it holds bytes that are none; convert it",
        )
    if not torch.cuda.is_available():
        log_once(logging.DEBUG, NO_GPU)
    with trained_model(arguments.load, arguments.step, flags=_NO_DATA) as trained:
        codec = codec_of(trained.args)
        device = next(trained.chunks[0].parameters()).device
        runs = "torch on the CPU" if device.type == "cpu" else f"on {device}"
        print(
            f"> {trained.directory}, {runs}: every token takes a forward pass of all tokens before "
            "it; nothing is cached",
            file=sys.stderr,
        )
        for prompt in arguments.prompt:
            generator = torch.Generator().manual_seed(arguments.seed)
            # For an empty prompt, start a new document.
            ids = codec.encode(prompt) or [codec.end]
            most, vocabulary = max(ids), vocabulary_of(trained.args)
            require(
                most < vocabulary,
                f"--prompt {prompt!r} holds the token {most}, and the vocabulary has {vocabulary} "
                "tokens: take the tokenizer that the model was trained with",
            )
            new = generate(
                trained.chunks[0], ids, arguments.tokens,
                vocabulary=codec.vocabulary, end=codec.end,
                maximum=trained.args.max_position_embeddings,
                temperature=arguments.temperature, generator=generator,
            )  # fmt: skip
            print(_on_a_line(codec.decode([*ids, *new])), flush=True)
    return 0


#: Megatron requires an evaluation interval even without evaluations.
_NO_DATA = ["--eval-iters", "0", "--eval-interval", "1"]


def _on_a_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
