"""A small tokenizer of transformers, chat templates like released ones, and conversations."""

import json
from pathlib import Path

from tests.cases.tokenizers import train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
SPECIAL = (
    *("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
#: Name -> template, with ``((`` and ``))`` around the assistant's text.
_MARKED = {
    # Adds a system message; a newline follows the end of a turn.
    "chatml": """
{%- if messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'assistant' %}(({{ m['content'] }}{{ '<|im_end|>' }})){{ '\\n' }}
{%- else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # Begins with <bos>; answers to tools have no header.
    "deepseek": """
{%- set ns = namespace(system='', tool=false) %}
{%- for m in messages if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m['content'] }}
{%- elif m['role'] == 'tool' %}{% set ns.tool = true %}
{{- '<result>' + m['content'] + '</result>' }}
{%- elif m['role'] == 'assistant' %}
{%- if not ns.tool %}{{ '<|Assistant|>' }}{% endif %}{% set ns.tool = false %}
{#- #}(({{ m['content'] + eos_token }}))
{%- endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1]['role'] == 'user' %}
{{- '<|Assistant|>' }}{% endif %}""",
    # Begins with <bos>, strips contents.
    "llama3": """
{{- bos_token }}
{%- for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
{%- if m['role'] == 'assistant' %}(({{ m['content'] | trim + '<|eot_id|>' }}))
{%- else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    # No header before the assistant, and a special token only at the end.
    "llama2": """
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}(({{ ' ' + m['content'] | trim + ' ' + eos_token }}))
{%- else %}{{ bos_token if loop.first }}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}
{%- endfor %}""",
    # Ends no turn: the next turn's first token does.
    "glm": """
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}{{ '<|assistant|>' }}((
{{- '\\n<think></think>\\n' + m['content'] | trim }}))
{%- elif m['role'] == 'tool' %}{{ '<|observation|>\\n' + m['content'] }}
{%- else %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
}  # fmt: skip
TEMPLATES = {name: text.replace("((", "").replace("))", "") for name, text in _MARKED.items()}
for _name, _text in _MARKED.items():
    # Jinja uses no such brackets.
    assert _text.count("((") == _text.count("))") == 1, _name
TAGGED = {
    name: text.replace("((", "{% generation %}").replace("))", "{% endgeneration %}")
    for name, text in _MARKED.items()
}
#: The token that ends the assistant's turn.
END = {
    "chatml": "<|im_end|>", "deepseek": "<eos>", "llama3": "<|eot_id|>", "llama2": "<eos>",
}  # fmt: skip


def message(role, content):
    return {"role": role, "content": content}


CONVERSATIONS = {
    "one turn": [message("user", "What is a licence?"), message("assistant", "A permission.")],
    "system and three turns": [
        message("system", "Answer in one word."),
        message("user", "Grant of a patent?"),
        message("assistant", "Yes"),
        message("user", "And a trademark?"),
        message("assistant", "No, see section 6 of the License."),
        message("user", "Thanks"),
        message("assistant", "Welcome"),
    ],
    "tool": [
        message("user", "How warm is it?"),
        message("assistant", "I look it up: weather()"),
        message("tool", '{"degrees": 21}'),
        message("assistant", "It is 21 degrees."),
        message("user", "Where?"),
        message("assistant", "Here."),
    ],
    "ends with the user": [
        message("user", "a"), message("assistant", "b c d"), message("user", "and then"),
    ],
    "empty answer": [
        message("user", "Say nothing."), message("assistant", ""), message("user", "Say it."),
        message("assistant", "It"),
    ],
    "bytes and spaces": [
        message("user", "  Grüße 🙂\n\n"), message("assistant", "日本語 und 🙂🙂"),
        message("user", "user\nassistant\n"), message("assistant", "one\n\n two  \n"),
    ],
}  # fmt: skip


def save_tokenizer(folder, template=None, vocabulary=320):
    """Save a byte-level tokenizer trained on the licence; return it."""
    from transformers import PreTrainedTokenizerFast

    licence = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    # It prepends <bos>, which templates write themselves.
    backend = train_tokenizer([licence], vocabulary, SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_rows(path, rows):
    """Write JSONL; return the path as text."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")
    return str(path)
