"""The demo model's tokenizer: byte-level BPE, and the chat template that uses its markers.

Any text round-trips: bytes that the training text never showed are tokens of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
#: Ids 0, 1, ... in this order.
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES))

# Closing marks keep the line ends that follow, so that a paragraph break costs no token of its
# own; an apostrophe is a contraction only where no letter follows ('twas, 'the).
_PATTERN = (
    r"'(?:s|t|d|m|re|ve|ll)(?!\p{L})"
    r"| ?\p{L}+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content is iterable -%}
{%- for part in content -%}
{%- if part.type in ['text', 'input_text', 'output_text'] -%}
{{- part.text -}}
{%- else -%}
{{- raise_exception("This model reads text only, not content of type '" ~ part.type ~ "'") -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- set role = {'developer': 'system', 'function': 'tool'}.get(message.role, message.role) -%}
{%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception("Unknown role '" ~ message.role ~ "'") -}}
{%- endif -%}
{%- set body = text(message.content) | trim -%}
{{- '<|' ~ role ~ '|>\\n' ~ body -}}
{%- for call in (message.tool_calls or []) -%}
{{- ('' if loop.first and not body else '\\n') ~ call.function.name ~ ' ' -}}
{%- set arguments = call.function.arguments -%}
{{- arguments if arguments is string else arguments | tojson -}}
{%- endfor -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of at most `vocab_size` entries, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(context: int) -> dict[str, object]:
    """The content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def render_turn(role: str, content: str) -> str:
    """One turn, exactly as `CHAT_TEMPLATE` renders it."""
    return f"<|{role}|>\n{content.strip()}{END_OF_TURN}\n"
