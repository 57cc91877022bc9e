"""Small real tokenizers of the kinds that language models use, written as model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't lazy, they'd say; we'll see!",
    "def hello(name):\n    return f'Hello, {name}!'\n\n\tx = 12345 + 67.89",
    "Grüße aus Köln, où l'été est beau. Привет мир. 日本語のテキスト。中文文本。",
    "emoji 🦜🎉 and combining é ñ, Ελληνικά, العربية",
] * 4

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_folder(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], *, model_type: str | None = None
) -> Path:
    """A model folder as far as text goes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def byte_level(*, bos: bool) -> Tokenizer:
    """GPT-2 / Llama 3 / Qwen: bytes, no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|begin|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A",
            special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))],
        )
    return tokenizer


def sentencepiece(*, bos: bool, prefix: bool = True, metaspace: bool = False) -> Tokenizer:
    """Llama 2 / Mistral / Gemma: `▁` for spaces, `<0xE2>` for bytes outside the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if prefix else "never", split=True
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=specials, limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    # Byte tokens belong to the vocabulary, but are not special.
    content["added_tokens"] = content["added_tokens"][:3]
    if not metaspace:
        content["pre_tokenizer"]["split"] = False
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if metaspace:
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first" if prefix else "never")
    else:
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            steps.append(decoders.Strip(content=" ", left=1))
        tokenizer.decoder = decoders.Sequence(steps)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def wordpiece() -> Tokenizer:
    """A decoder that can only be run on a whole list of tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


_END = {"eos_token": "<|endoftext|>", "chat_template": CHAT}
_SP = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHAT}


def write_kind(kind: str, folder: Path) -> Path:
    """The model folder of a named kind."""
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if kind == "byte_level":
        return write_folder(folder, byte_level(bos=False), {**_END, **fast})
    if kind == "byte_level_bos":
        config = {**_END, **fast, "bos_token": "<|begin|>", "add_bos_token": False}
        return write_folder(folder, byte_level(bos=True), config, model_type="llama")
    if kind == "qwen3":
        config = {
            **_END,
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "additional_special_tokens": ["<|im_end|>", "<|brand new|>"],
            "model_max_length": 4096,
        }
        return write_folder(folder, byte_level(bos=False), config, model_type="qwen3")
    if kind == "qwen2_misnamed":
        return write_folder(folder, byte_level(bos=False), {**_END, **fast}, model_type="qwen2")
    if kind == "llama":
        config = {**_SP, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        return write_folder(folder, sentencepiece(bos=True), config, model_type="llama")
    if kind == "llama_legacy":
        config = {**_SP, "tokenizer_class": "LlamaTokenizerFast", "legacy": True,
                  "model_max_length": 10**30}  # fmt: skip
        return write_folder(folder, sentencepiece(bos=False), config, model_type="llama")
    if kind == "llama_byte_level":
        config = {**_END, "tokenizer_class": "LlamaTokenizer", "bos_token": "<|begin|>"}
        return write_folder(folder, byte_level(bos=True), config, model_type="llama")
    if kind == "mistral":
        config = {**_SP, "tokenizer_class": "LlamaTokenizer"}
        return write_folder(folder, sentencepiece(bos=True), config, model_type="mistral")
    if kind == "olmo2":
        config = {**_SP, "tokenizer_class": "LlamaTokenizer"}
        return write_folder(folder, sentencepiece(bos=False), config, model_type="olmo2")
    if kind == "gemma_like":
        tokenizer = sentencepiece(bos=True, prefix=False)
        return write_folder(folder, tokenizer, {**_SP, **fast})
    if kind == "metaspace":
        tokenizer = sentencepiece(bos=False, metaspace=True)
        return write_folder(folder, tokenizer, {**_SP, **fast})
    if kind == "wordpiece":
        return write_folder(folder, wordpiece(), {**fast, "unk_token": "[UNK]"})
    raise ValueError(kind)


KINDS = (
    "byte_level",
    "byte_level_bos",
    "qwen3",
    "qwen2_misnamed",
    "llama",
    "llama_legacy",
    "llama_byte_level",
    "mistral",
    "olmo2",
    "gemma_like",
    "metaspace",
    "wordpiece",
)
