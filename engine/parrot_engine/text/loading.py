"""Reads a model folder's tokenizer and chat templates, without downloading or executing anything.

The goal is the tokenizer that `transformers.AutoTokenizer` (version 5) makes of the same folder,
which may differ from `tokenizer.json`, because some classes rebuild the pipeline around the
vocabulary. `LlamaTokenizer` and `Qwen2Tokenizer` are rebuilt here. Classes that use the file
unchanged need nothing more. transformers, if installed, loads any other class.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Regex as TokenizersRegex
from tokenizers.models import BPE

from parrot_engine.text.chat import ChatTemplate
from parrot_engine.text.tokenizer import TextAssets, TextAssetsError

_log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]
#: One chat template, several by name, or none.
_Templates: TypeAlias = str | dict[str, str] | None

#: Named tokens that chat templates see as variables.
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

#: Larger lengths in `tokenizer_config.json` mean "no limit" (transformers writes 1e30).
_NO_LENGTH_LIMIT = 10**9

#: Classes that use `tokenizer.json` unchanged.
_VERBATIM_CLASSES = {"", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"}

#: Classes that transformers registers for a model type and that are rebuilt here.
_REGISTERED_CLASSES = dict.fromkeys(
    ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"
)

#: Model types whose checkpoints name a wrong class: the registered one is used.
_CORRECTED_MODEL_TYPES = {"qwen2"}

#: Causal language models whose tokenizer is used unchanged whatever class the checkpoint names
#: (transformers, models/auto/tokenization_auto.py).
_VERBATIM_MODEL_TYPES = frozenset({
    "arctic", "chatlm", "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid",
    "granitemoeshared", "h2ovl_chat", "hyperclovax", "internlm2", "internlm3", "iquestcoder",
    "jamba", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral",
    "mistral3", "mixtral", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "persimmon", "phi3",
    "phimoe", "stablelm",
})  # fmt: skip

#: Qwen2's pre-tokenizer (transformers, models/qwen2/tokenization_qwen2.py).
_QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_text_assets(folder: Path) -> TextAssets:
    """Read the tokenizer and chat templates of a model folder.

    Raises:
        TextAssetsError: the folder has no tokenizer, or a file is not understood.
    """
    config = _read_json(folder / "tokenizer_config.json") or {}
    chat_template = _chat_template(folder, config)
    tokenizer_file = folder / "tokenizer.json"
    class_name = _tokenizer_class(folder, config)
    if not tokenizer_file.is_file():
        return _from_transformers(folder, chat_template, reason="it has no tokenizer.json")
    try:
        source = tokenizer_file.read_text(encoding="utf-8")
        if class_name in ("LlamaTokenizer", "Qwen2Tokenizer") and not (
            class_name == "LlamaTokenizer" and '"ByteLevel"' in source
        ):
            return _rebuilt(folder, class_name, source, config, chat_template)
        if class_name in _VERBATIM_CLASSES or class_name == "LlamaTokenizer":
            return _verbatim(folder, source, config, chat_template)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise TextAssetsError(f"{tokenizer_file} cannot be read: {error}") from error
    except Exception as error:  # tokenizers raises bare Exception for a malformed file
        raise TextAssetsError(f"{tokenizer_file} is not a valid tokenizer: {error}") from error
    try:
        return _from_transformers(folder, chat_template, reason=f"its class is {class_name}")
    except TextAssetsError as error:
        _log.warning("%s Using tokenizer.json as it is.", error)
        return _verbatim(folder, source, config, chat_template)


def load_chat_template(folder: Path) -> ChatTemplate:
    """Read the chat templates of a model folder, without its special tokens.

    Raises:
        TextAssetsError: a file is not understood.
    """
    return ChatTemplate(_chat_template(folder, _read_json(folder / "tokenizer_config.json") or {}))


def _read_json(path: Path) -> Json | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TextAssetsError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TextAssetsError(f"{path} does not hold a JSON object")
    return value


def _chat_template(folder: Path, config: Json) -> _Templates:
    """Read the templates; files beside the checkpoint precede the entry in
    `tokenizer_config.json`.
    """
    templates: dict[str, str] = {}
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if not templates:
        found = config.get("chat_template")
        if found is None:
            found = (_read_json(folder / "chat_template.json") or {}).get("chat_template")
        if isinstance(found, list):
            return {str(entry["name"]): str(entry["template"]) for entry in found}
        if isinstance(found, dict):
            return {str(name): str(template) for name, template in found.items()}
        return None if found is None else str(found)
    return templates["default"] if set(templates) == {"default"} else templates


def _tokenizer_class(folder: Path, config: Json) -> str:
    """Return the class that AutoTokenizer would use, without its `Fast` suffix; empty if
    unnamed.
    """
    model_config = _read_json(folder / "config.json") or {}
    model_type = str(model_config.get("model_type") or "")
    named = str(config.get("tokenizer_class") or model_config.get("tokenizer_class") or "")
    named = named.removesuffix("Fast")
    if model_type in _VERBATIM_MODEL_TYPES:
        return ""
    registered = _REGISTERED_CLASSES.get(model_type)
    if registered is None:
        return named
    if not named or model_type in _CORRECTED_MODEL_TYPES:
        return registered
    return named


def _added_token(value: Any) -> AddedToken:
    if isinstance(value, dict):
        known = {key: value[key] for key in value if key not in ("__type", "id")}
        return AddedToken(**known)
    return AddedToken(str(value), special=True)


class _Names:
    """Special and added tokens as the configuration files declare them."""

    def __init__(self, folder: Path, source: Json, config: Json, defaults: dict[str, str]) -> None:
        declared: Json = {**defaults, **config}
        #: Tokens by the id in the configuration.
        self.by_id: dict[int, AddedToken] = {}
        if "added_tokens_decoder" in config:
            for index, token in config["added_tokens_decoder"].items():
                self.by_id[int(index)] = _added_token(token)
        else:
            # Older checkpoints spread the names over several files.
            for key, value in (_read_json(folder / "special_tokens_map.json") or {}).items():
                declared[key] = value
            for token in source.get("added_tokens") or ():
                self.by_id[int(token["id"])] = _added_token(token)
        known = {str(token.content): token for token in self.by_id.values()}
        extra = declared.get("extra_special_tokens") or declared.get("additional_special_tokens")
        named: Json = {
            key: value
            for key, value in declared.items()
            if key in _NAMED_TOKENS
            or (key.endswith("_token") and isinstance(value, (str, dict)) and value)
        }
        if isinstance(extra, dict):
            named.update(extra)
            extra = []
        self.named: dict[str, AddedToken] = {}
        for key, value in named.items():
            if value is not None:
                token = _added_token(value)
                self.named[key] = known.get(token.content, token)
        self.extra = [_added_token(value) for value in extra or ()]

    def texts(self) -> dict[str, str]:
        return {key: token.content for key, token in self.named.items()}


def _add_missing_tokens(tokenizer: Tokenizer, names: _Names) -> bool:
    """Add tokens that the configuration declares and the pipeline lacks, in transformers' order."""
    present = tokenizer.get_added_tokens_decoder().values()
    shapes = {repr(token) for token in present}
    missing = [token for _, token in sorted(names.by_id.items()) if repr(token) not in shapes]
    contents = {token.content for token in present} | {token.content for token in missing}
    for token in [*names.named.values(), *names.extra]:
        if token.content not in contents:
            contents.add(token.content)
            missing.append(token)
    special = set(names.texts().values())
    for token in missing:
        if token.content in special:
            token.special = True
    if missing:
        tokenizer.add_tokens(missing)
    return bool(missing)


def _assets(
    tokenizer_json: str, names: _Names, config: Json, chat_template: _Templates
) -> TextAssets:
    length = config.get("model_max_length", config.get("max_len"))
    limited = isinstance(length, (int, float)) and 0 < length < _NO_LENGTH_LIMIT
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        special_tokens=names.texts(),
        model_max_length=int(length) if limited and length is not None else None,
        split_special_tokens=bool(config.get("split_special_tokens", False)),
    )


def _verbatim(folder: Path, source: str, config: Json, chat_template: _Templates) -> TextAssets:
    names = _Names(folder, json.loads(source), config, {})
    tokenizer = Tokenizer.from_str(source)
    changed = _add_missing_tokens(tokenizer, names)
    return _assets(tokenizer.to_str() if changed else source, names, config, chat_template)


def _rebuilt(
    folder: Path, class_name: str, source: str, config: Json, chat_template: _Templates
) -> TextAssets:
    """Build the class's pipeline around the file's vocabulary, merges and post-processor."""
    content = json.loads(source)
    if content.get("model", {}).get("type", "BPE") != "BPE":
        return _from_transformers(folder, chat_template, reason="its model is not BPE")
    vocab = content["model"]["vocab"]
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in content["model"]["merges"]
    ]
    prefix_space = config.get("add_prefix_space")
    if class_name == "LlamaTokenizer":
        defaults = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
        tokenizer = _llama(vocab, merges, prefix_space is not False, bool(config.get("legacy")))
    else:
        end = "<|endoftext|>"
        defaults = {"unk_token": end, "eos_token": end, "pad_token": end}
        tokenizer = _qwen2(vocab, merges, bool(prefix_space))
    processor = Tokenizer.from_str(source).post_processor
    if processor is None:
        processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    tokenizer.post_processor = processor
    names = _Names(folder, content, config, defaults)
    _add_missing_tokens(tokenizer, names)
    if class_name == "Qwen2Tokenizer":
        texts = [*names.texts().values(), *(token.content for token in names.extra)]
        tokenizer.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(texts)])
    return _assets(tokenizer.to_str(), names, config, chat_template)


def _llama(vocab: Any, merges: Any, prefix_space: bool, legacy: bool) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    scheme = "never" if not prefix_space else "always" if legacy else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _qwen2(vocab: Any, merges: Any, prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(TokenizersRegex(_QWEN2_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_transformers(folder: Path, chat_template: _Templates, *, reason: str) -> TextAssets:
    """Let transformers build the tokenizer, and use its pipeline."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TextAssetsError(
            f"The tokenizer in {folder} needs the transformers package ({reason}): install it, or "
            "put a tokenizer.json into the folder."
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        tokenizer_json = str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise TextAssetsError(
            f"transformers cannot load the tokenizer in {folder} ({reason}): {error}"
        ) from error
    length = int(tokenizer.model_max_length)
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template if chat_template is not None else tokenizer.chat_template,
        special_tokens={key: str(value) for key, value in tokenizer.special_tokens_map.items()},
        model_max_length=length if length < _NO_LENGTH_LIMIT else None,
        split_special_tokens=bool(tokenizer.split_special_tokens),
    )
