"""The loss mask of conversations, token by token, against transformers' rendering."""

import json

import numpy as np
import pytest

from megatron_dsa.errors import ConfigError
from tests.cases.chat import (
    CONVERSATIONS,
    END,
    TAGGED,
    TEMPLATES,
    message,
    save_tokenizer,
    write_rows,
)

pytest.importorskip("transformers")

from megatron_dsa.training.chat import ChatTokenizer, Conversation, read_conversations


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encoded(tokenizer, template, conversation, tools=None):
    (marked,) = ChatTokenizer(tokenizer, template).encode(
        [Conversation("f:1", conversation, tools)]
    )
    assert marked.dtype == np.int32
    return np.where(marked < 0, ~marked, marked).tolist(), (marked >= 0).tolist()


def ids_of(tokenizer, template, messages, **settings):
    found = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, **settings
    )
    return found["input_ids"]


def masked_by_prefixes(tokenizer, template, conversation, end):
    """Return ids and mask by rendering and tokenising every prefix separately."""
    ids = ids_of(tokenizer, template, conversation)
    mask = [False] * len(ids)
    for index, each in enumerate(conversation):
        if each["role"] == "assistant":
            before = ids_of(tokenizer, template, conversation[:index], add_generation_prompt=True)
            until = ids_of(tokenizer, template, conversation[: index + 1])
            assert ids[: len(until)] == until and until[: len(before)] == before
            turn = ids[len(before) : len(until)]
            if end is not None:
                turn = turn[: turn.index(tokenizer.convert_tokens_to_ids(end)) + 1]
            mask[len(before) : len(before) + len(turn)] = [True] * len(turn)
    return ids, mask


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", END)
def test_mask_by_prefixes(template, name, tokenizer):
    template, end, conversation = TEMPLATES[template], END[template], CONVERSATIONS[name]
    ids, mask = encoded(tokenizer, template, conversation)
    expected = masked_by_prefixes(tokenizer, template, conversation, end)
    assert (ids, mask) == expected
    assert ids.count(tokenizer.bos_token_id) == template.count("bos_token")
    ends = [i for i, x in enumerate(ids) if x == tokenizer.convert_tokens_to_ids(end)]
    turns = sum(each["role"] == "assistant" for each in conversation)
    assert sum(mask[i] for i in ends) == turns


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_turns_that_nothing_ends(name, tokenizer):
    """The next turn's token must end one; <eos>, which no template writes, the last."""
    template, conversation = TEMPLATES["glm"], CONVERSATIONS[name]
    ids, mask = encoded(tokenizer, template, conversation)
    expected_ids, expected = masked_by_prefixes(tokenizer, template, conversation, None)
    for index in range(1, len(expected)):
        if expected_ids[index] in tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"]):
            expected[index] = expected[index - 1]
    if conversation[-1]["role"] == "assistant":
        expected_ids, expected = [*expected_ids, tokenizer.eos_token_id], [*expected, True]
    assert (ids, mask) == (expected_ids, expected)


@pytest.mark.parametrize(
    ("template", "name"),
    # If a text ends in a character of several tokens, transformers marks only the first.
    sorted({(x, y) for x in TAGGED for y in CONVERSATIONS} - {("glm", "bytes and spaces")}),
)
def test_tags_of_the_template(template, name, tokenizer):
    conversation = CONVERSATIONS[name]
    ids, mask = encoded(tokenizer, TAGGED[template], conversation)
    found = tokenizer.apply_chat_template(
        conversation,
        chat_template=TAGGED[template],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert ids == found["input_ids"]
    assert mask == [bool(x) for x in found["assistant_masks"]]
    if template in END:
        assert (ids, mask) == encoded(tokenizer, TEMPLATES[template], conversation)


@pytest.mark.parametrize("template", TEMPLATES)
def test_offsets_without_spaces(template, tokenizer, tmp_path):
    from tokenizers import processors

    trimmed = save_tokenizer(tmp_path)
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    spaces = [message("user", " a "), message("assistant", "  b  c   "), message("user", "\n ")]
    for conversation in (*CONVERSATIONS.values(), spaces):
        found = [encoded(each, TEMPLATES[template], conversation) for each in (trimmed, tokenizer)]
        assert found[0] == found[1]


def test_bytes_of_one_character(tokenizer):
    """All tokens of a final character must be in the loss; transformers' mask has one."""
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}"
    template += "{% generation %}{{ m['content'] }}{% endgeneration %}{% endif %}{% endfor %}"
    ids, mask = encoded(tokenizer, template, [message("user", "a"), message("assistant", "b🙂")])
    assert len(ids) == 6 and mask == [False, True, True, True, True, True]


def test_a_token_across_the_border(tokenizer):
    """It holds some of the assistant's text, so it is in the loss."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids, mask = encoded(tokenizer, template, [message("user", "x t"), message("assistant", "he")])
    assert tokenizer.convert_ids_to_tokens(ids) == ["x", "Ġthe", "<eos>"]
    assert mask == [False, True, True]


def test_tools_and_reasoning_reach_the_template(tokenizer):
    template = "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}"
    template += "<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content or '' }}"
    template += "{% for c in m.tool_calls %}{{ c.name }}"
    template += "{% endfor %}{{ eos_token }}{% endfor %}"
    answer = {"role": "assistant", "content": None, "tool_calls": [{"name": "weather"}]}
    conversation = [message("user", "x"), answer | {"reasoning_content": "hm "}]
    ids, mask = encoded(tokenizer, template, conversation, [{"name": "weather"}])
    assert tokenizer.decode(ids) == "weather <|user|>x<eos><|assistant|>hm weather<eos>"
    text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert text == "<|assistant|>hm weather<eos>"  # this template has no generation prompt


DROPS_REASONING = """
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<eos>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize(
    ("template", "name", "rule", "fix"),
    [
        (DROPS_REASONING, "system and three turns", "message 3", "{% generation %}"),
        ("{{ raise_exception('roles must alternate') }}", "one turn", "refuses it: roles must", ""),
        ("{{ messages[3].content }}", "one turn", "f:1: the chat template refuses it", ""),
        ("{{ messages[0].content }}", "one turn", "has no token in the loss", ""),
    ],
)
def test_refused_templates(template, name, rule, fix, tokenizer):
    with pytest.raises(ConfigError, match=rule) as refusal:
        encoded(tokenizer, template, CONVERSATIONS[name])
    assert str(refusal.value).startswith("f:1") and fix in str(refusal.value)


def test_the_assistant_begins(tokenizer):
    greeting = [message("assistant", "Hello"), message("user", "Hi"), message("assistant", "Yes?")]
    with pytest.raises(ConfigError, match="f:1 begins with the assistant's message"):
        encoded(tokenizer, TEMPLATES["chatml"], greeting)
    ids, mask = encoded(tokenizer, TAGGED["chatml"], greeting)
    text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert text == "Hello<|im_end|>Yes?<|im_end|>"


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", 2),
        (TEMPLATES["deepseek"], 0),
        (TEMPLATES["glm"], 0),
    ],
)
def test_turns_without_an_end_are_counted(template, turns, tokenizer):
    chat = ChatTokenizer(tokenizer, template)
    chat.encode([Conversation("f:1", CONVERSATIONS["system and three turns"])])
    assert chat.open_turns == turns


def test_the_refused_template_with_tags(tokenizer):
    answer = "{{ m.content }}<eos>"
    tagged = "{% if m.role == 'assistant' %}{% generation %}" + answer + "{% endgeneration %}"
    tagged += "{% else %}" + answer + "{% endif %}"
    template = DROPS_REASONING.replace(answer, tagged)
    ids, mask = encoded(tokenizer, template, CONVERSATIONS["system and three turns"])
    text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert text == "Yes<eos>No, see section 6 of the License.<eos>Welcome<eos>"


def test_a_tokenizer_without_template_or_offsets(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        ChatTokenizer(tokenizer)
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.jinja"):
        ChatTokenizer(tokenizer, "nowhere.jinja")
    with pytest.raises(ConfigError, match="must be a fast tokenizer"):
        ChatTokenizer(object())
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATES["chatml"])
    chat, same = ChatTokenizer(tokenizer, str(file)), ChatTokenizer(tokenizer, TEMPLATES["chatml"])
    row = Conversation("f:1", CONVERSATIONS["one turn"])
    assert chat.encode([row])[0].tolist() == same.encode([row])[0].tolist()
    assert chat.fingerprint == same.fingerprint
    assert chat.fingerprint != ChatTokenizer(tokenizer, TEMPLATES["glm"]).fingerprint
    assert "[[A permission.<|im_end|>]]" in chat.show(chat.encode([row])[0])


USER, ANSWER = message("user", "a"), message("assistant", "b")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "must be one JSON object"),
        ("[1]", "must be a JSON object, got list"),
        ("{}", "got no key"),
        ({"text": "a"}, "either messages, or prompt and completion, got text"),
        ({"prompt": "a"}, "prompt and completion, got prompt"),
        ({"messages": [ANSWER], "prompt": "a", "completion": "b"}, "either messages, or prompt"),
        ({"prompt": "a", "completion": 3}, "completion must be text"),
        ({"messages": []}, "messages must be a filled list"),
        ({"messages": ["a"]}, "message 1 must be an object"),
        ({"messages": [{"content": "a"}]}, "message 1 must have a role .* got none"),
        ({"messages": [USER, message("gpt", "b")]}, "message 2 must have a role .* got 'gpt'"),
        (
            {"messages": [{"role": "user"}]},
            r"message 1 \(user\) must have content, a text, got none",
        ),
        ({"messages": [message("user", [])]}, r"\(user\) must have content, a text, got list"),
        ({"messages": [USER, message("assistant", None)]}, r"2 \(assistant\) must have content"),
        ({"messages": [USER]}, "must have a message of the role assistant"),
    ],
)
def test_wrong_rows(line, rule, tmp_path):
    file = tmp_path / "chat.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_text("\n" + json.dumps({"messages": [USER, ANSWER]}) + f"\n{text}\n")
    with pytest.raises(ConfigError, match=rule) as refusal:
        list(read_conversations(file))
    assert str(refusal.value).startswith(f"{file}:3")


def test_rows_of_files(tmp_path):
    file = tmp_path / "chat.jsonl"
    text = '{"prompt": "a\u2028b", "completion": "c"}\r\n \r\n'
    file.write_bytes(b"\xef\xbb\xbf" + (text + json.dumps({"messages": [USER, ANSWER]})).encode())
    first, second = read_conversations(file)
    assert first.messages == [message("user", "a\u2028b"), message("assistant", "c")]
    assert (first.where, second.where) == (f"{file}:1", f"{file}:3")
    assert second.messages == [USER, ANSWER]
    file.write_bytes(b'{"prompt": "\xff", "completion": "c"}')
    with pytest.raises(ConfigError, match=r":1 must be one JSON object: .*utf-8"):
        list(read_conversations(file))


#: GLM's: the prompt opens <think>, an answer without reasoning closes it at once.
THINKING = """
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}{{ '<|assistant|>' }}
{%- if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] }}{% endif %}
{{- '</think>' + m['content'] }}
{%- else %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' + ('</think>' if enable_thinking is false else '<think>') }}{% endif %}"""


@pytest.mark.parametrize("reasoning", [None, "one and one"])
def test_a_prompt_that_opens_thinking(tokenizer, reasoning):
    answer = message("assistant", "2") | {"reasoning_content": reasoning}
    ids, mask = encoded(tokenizer, THINKING, [message("user", "1 + 1?"), answer])
    trained = tokenizer.decode([each for each, inside in zip(ids, mask, strict=True) if inside])
    assert trained == ("2<eos>" if reasoning is None else "one and one</think>2<eos>")


def test_a_message_without_content_is_empty(tmp_path, tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [message("user", "a"), call]}])
    (read,) = read_conversations(path)
    assert read.messages[1]["content"] == ""


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="f:1: the chat template refuses it"):
        encoded(tokenizer, THINKING, [message("user", "\ud800"), message("assistant", "a")])
