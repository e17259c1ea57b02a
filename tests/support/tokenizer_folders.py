"""Small model folders with real tokenizers of several kinds, trained in a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

START, END, TEXT_END, BEGIN = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>"
SPECIAL = [TEXT_END, START, END, BEGIN]

# ChatML with tools, for templates that print strings.
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# What Llama 3 and Qwen split text with, in essence.
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog didn't mind at all.",
    "Numbers 123456 and code: def f(x): return {'a': [1, 2, 3]}\n\n\tindented   spaces",
    "Grüße aus Zürich, schöne Straße. Привет мир. 世界 你好. naïve café",
    "user assistant system tool <tool_call> </tool_call> im_start im_end",
)


def _bpe(pre_tokenizer: object, normalizer: object = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def tokenizer_of(kind: str) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "byte-level":
        return _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    if kind == "prefix-space":
        return _bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))
    if kind == "words":
        return _bpe(pre_tokenizers.Sequence([pre_tokenizers.Split(WORDS, "isolated"), byte_level]), normalizers.NFC())
    if kind == "no-pre-tokenizer":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
        tokenizer.train_from_iterator(TEXTS * 3, trainer)
        return tokenizer
    if kind == "unigram":
        return _unigram()
    if kind == "swallowing":  # tokens that take the spaces beside them
        tokenizer = _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
        tokenizer.add_special_tokens(
            [
                AddedToken("<|left|>", lstrip=True, normalized=False),
                AddedToken("<|right|>", rstrip=True, normalized=False),
                AddedToken("<|im", normalized=False),  # begins others
                AddedToken("<|im_end|>\n", normalized=False),  # goes on where another ends
            ]
        )
        tokenizer.add_tokens([AddedToken("quick brown", normalized=True)])
        return tokenizer
    if kind == "begin":  # with a token before every text, as Llama has
        tokenizer = _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, SPECIAL.index(BEGIN))]
        )
        return tokenizer
    raise AssertionError(kind)


KINDS = ("byte-level", "prefix-space", "words", "no-pre-tokenizer", "unigram", "swallowing", "begin")


def write_folder(folder: Path, kind: str = "byte-level", template: object = CHATML, **config: object) -> Path:
    """A model folder as an engine would be given."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_of(kind).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "bos_token": {"content": BEGIN}, "pad_token": None, **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder
