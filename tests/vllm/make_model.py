"""Write a Llama of 79 million random weights that vLLM serves on a CPU:  make_model.py DIR

Its words are noise; tokens, caching, scheduling and timing are real, and a cold prefill costs about a millisecond a
token, so that a prefix-cache hit matters. Nothing is downloaded: the tokenizer is trained on the documentation strings
of Python's standard library. The same Python makes the same model, so that greedy answers agree between engines.

Runs in the vLLM environment (numpy, tokenizers, safetensors). Does nothing if DIR is already a model of this kind.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# one token each, as in the models whose tool calls vLLM's `hermes` parser reads
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END, "<tool_call>", "</tool_call>"]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,  # vLLM's CPU attention takes 32, 64, 80, ...
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 4096,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
    "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
}

CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def training_texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield text


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    if tokenizer.get_vocab_size() != CONFIG["vocab_size"]:
        raise SystemExit(f"the training text gave only {tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_weights(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(20)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    weights = {
        "model.embed_tokens.weight": 0.05 * random.standard_normal((CONFIG["vocab_size"], hidden), np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            noise = random.standard_normal((rows, columns), np.float32)
            weights[f"model.layers.{layer}.{name}.weight"] = noise / np.float32(columns**0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def main() -> None:
    folder = Path(sys.argv[1])
    kind = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = folder / "kvgate-model"
    if stamp.exists() and stamp.read_text() == kind:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:  # a model half written is never found by a test
        new = Path(temporary) / "model"
        new.mkdir()
        write_tokenizer(new)
        write_weights(new)
        (new / "config.json").write_text(json.dumps(CONFIG, indent=1))
        ends = {key: CONFIG[key] for key in ("eos_token_id", "pad_token_id")}
        (new / "generation_config.json").write_text(json.dumps(ends))
        (new / "kvgate-model").write_text(kind)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


if __name__ == "__main__":
    main()
