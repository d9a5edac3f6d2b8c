"""Conversations in JSONL and their token ids, which mark tokens in the loss."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dsa.errors import ConfigError, require

ROLES = ("system", "developer", "user", "assistant", "tool")
#: Tag by which a template marks the assistant's text.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_VERSION = "1"


@dataclass(frozen=True)
class Conversation:
    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    @property
    def has_empty_answer(self) -> bool:
        return any(
            each["role"] == "assistant" and not each.get("content") and not each.get("tool_calls")
            for each in self.messages
        )


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Yield the conversations of a JSONL file; skip blank lines.

    A line holds ``messages`` (each with ``role`` and ``content``) and optionally ``tools``; or
    ``prompt`` and ``completion``, which become messages of user and assistant.

    Raises:
        ConfigError: a line is wrong; the message names file and line.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    line = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{where} must be one JSON object: {error}") from error
                yield _conversation(where, line)


def _conversation(where: str, line: Any) -> Conversation:
    require(isinstance(line, dict), f"{where} must be a JSON object, got {type(line).__name__}")
    pair = [key for key in ("prompt", "completion") if key in line]
    require(
        ("messages" in line) + bool(pair) == 1 and len(pair) != 1,
        f"{where} must have either messages, or prompt and completion, got "
        f"{', '.join(line) or 'no key'}",
    )
    if pair:
        for key in pair:
            require(isinstance(line[key], str), f"{where}: {key} must be text")
        messages = [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["completion"]},
        ]
    else:
        messages = line["messages"]
        require(isinstance(messages, list) and messages, f"{where}: messages must be a filled list")
    for number, message in enumerate(messages, 1):
        _check_message(f"{where}: message {number}", message)
    # Templates would print missing content as None.
    messages = [each | {"content": each.get("content") or ""} for each in messages]
    require(
        any(each["role"] == "assistant" for each in messages),
        f"{where} must have a message of the role assistant: there is nothing to train on",
    )
    return Conversation(where, messages, line.get("tools"))


def _check_message(where: str, message: Any) -> None:
    require(isinstance(message, dict), f"{where} must be an object of role and content")
    role, content = message.get("role"), message.get("content")
    require(
        role in ROLES,
        f"{where} must have a role of {', '.join(ROLES)}, got "
        f"{'none' if role is None else repr(role)}",
    )
    calls = role == "assistant" and bool(message.get("tool_calls"))
    require(
        isinstance(content, str) or (calls and content is None),
        f"{where} ({role}) must have content, a text, got "
        f"{'none' if content is None else type(content).__name__}",
    )


class ChatTokenizer:
    """Transformers tokenizer with its chat template.

    Args:
        tokenizer: fast tokenizer, whose offsets map text to tokens.
        template: Jinja template or its file; default: the tokenizer's.

    Attributes:
        fingerprint: digest of all inputs that determine ids.
        open_turns: number of encoded turns that no special token ends.

    Raises:
        ConfigError: there is no template, or the tokenizer has no offsets.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        require(
            getattr(tokenizer, "is_fast", False),
            "--tokenizer-model must be a fast tokenizer (a folder with tokenizer.json) with --sft: "
            "the others give no offsets of tokens in the text",
        )
        if template is not None and "{" not in template:
            require(Path(template).is_file(), f"--chat-template: there is no file {template}")
            template = Path(template).read_text(encoding="utf-8")
        require(
            template or tokenizer.chat_template,
            "--tokenizer-model has no chat template, which --sft needs: put chat_template.jinja "
            "into its folder, or give --chat-template FILE",
        )
        from transformers import __version__ as release

        self._tokenizer, self._template = tokenizer, template
        self.open_turns = 0
        added = tokenizer.added_tokens_decoder.items()
        self._special = {index for index, token in added if token.special}
        parts = (
            _VERSION, release, tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map,
            template or tokenizer.chat_template,
        )  # fmt: skip
        self.fingerprint = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    def encode(self, conversations: Sequence[Conversation]) -> list[np.ndarray]:
        """Return int32 token ids per conversation, ``~id`` for tokens outside the loss.

        The loss covers the assistant's messages and the token that ends the turn: a special token,
        else the first token of the next turn, else ``eos_token``. Templates with
        ``{% generation %}`` mark the loss themselves.

        Raises:
            ConfigError: the template rejects a conversation, or an answer cannot be located.
        """
        rendered = [self._render_whole(each) for each in conversations]
        encoded = self._tokenizer(
            [text for text, *_ in rendered],
            add_special_tokens=False, return_offsets_mapping=True, verbose=False,
        )  # fmt: skip
        wheres = [each.where for each in conversations]
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        return [self._mark(*each) for each in zip(wheres, rendered, ids, offsets, strict=True)]

    def show(self, marked: np.ndarray, limit: int = 600) -> str:
        """Decode a conversation; ``[[`` and ``]]`` enclose tokens in the loss."""
        runs = np.split(marked, np.flatnonzero(np.diff(marked >= 0)) + 1)
        texts = []
        for run in runs:
            text = self._tokenizer.decode(np.where(run < 0, ~run, run).tolist())
            texts.append(f"[[{text}]]" if run[0] >= 0 else text)
        text = "".join(texts)
        return text if len(text) <= limit else f"{text[:limit]} ..."

    def _render_whole(self, chat: Conversation) -> tuple[str, list[tuple[int, int]], bool]:
        """Return the text, the assistant's spans ``[begin, end)``, and True for tagged spans."""
        template = self._tokenizer.get_chat_template(self._template, chat.tools)
        if _GENERATION.search(template):
            marks = {"return_assistant_tokens_mask": True}
            return *self._render(chat, template, len(chat.messages), **marks), True
        text, _ = self._render(chat, template, len(chat.messages))
        spans = []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            require(
                index,
                f"{chat.where} begins with the assistant's message, and the chat template does not "
                "mark it: put a message of another role before it, or leave it out",
            )
            until, _ = self._render(chat, template, index + 1)
            befores = [
                # GLM's generation prompt opens <think> unless thinking is off.
                self._render(chat, template, index, add_generation_prompt=True, **thinking)[0]
                for thinking in ({}, {"enable_thinking": False})
            ]
            before = next(filter(until.startswith, befores), None)
            require(
                before is not None and text.startswith(until),
                f"{chat.where}: the chat template renders the messages up to the assistant's "
                f"(message {index + 1}) in another way than within the conversation, so that its "
                "text cannot be located: put {% generation %} and {% endgeneration %} around it in "
                "the template, and give that to --chat-template FILE",
            )
            assert before is not None
            spans.append((len(before), len(until)))
        return text, spans, False

    def _render(
        self, chat: Conversation, template: str, count: int, **settings: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [chat.messages[:count]], chat.tools, chat_template=template, **settings,
                **self._tokenizer.special_tokens_map,
            )  # fmt: skip
            texts[0].encode()  # unpaired surrogates have no UTF-8
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"{chat.where}: the chat template refuses it: {error}") from error
        return texts[0], spans[0] if spans else []

    def _mark(self, where: str, rendered: tuple, ids: list[int], offsets: list) -> np.ndarray:
        text, spans, tagged = rendered
        begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
        in_loss = np.zeros(len(ids) + 1, bool)  # the last entry is for eos_token
        for first, last in spans:
            # A token that overlaps the span is in the loss.
            inside = np.flatnonzero((begin < last) & (end > first))
            if inside.size:
                start, stop = int(inside[0]), int(inside[-1]) + 1
                if not tagged:
                    stop = self._end_of_turn(text, ids, offsets, start, stop)
                in_loss[start:stop] = True
        if in_loss[-1]:
            eos = self._tokenizer.eos_token_id
            require(
                eos is not None,
                f"{where}: the chat template ends the last turn with no special token, and the "
                "tokenizer has no eos_token: set one in its tokenizer_config.json",
            )
            ids = [*ids, eos]
        require(
            in_loss.any(),
            f"{where} has no token in the loss: the chat template renders nothing of the "
            "assistant's messages",
        )
        marked = np.array(ids, np.int32)
        return np.where(in_loss[: len(ids)], marked, ~marked)

    def _end_of_turn(self, text: str, ids: list[int], offsets: list, start: int, stop: int) -> int:
        last = stop
        while last > start and not text[slice(*offsets[last - 1])].strip():
            last -= 1
        if last > start and ids[last - 1] in self._special:
            return last  # the newline is outside the loss
        closed = stop == len(ids) or ids[stop] in self._special
        self.open_turns += not closed
        return stop + closed
