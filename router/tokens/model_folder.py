"""What a model's folder says about tokens. Files of others: sizes and shapes are checked, nothing in them is run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

TOKENIZER_LIMIT_BYTES: Final = 128 * 1024 * 1024  # the largest public ones have 33 MB
CONFIG_LIMIT_BYTES: Final = 8 * 1024 * 1024  # tokenizer_config.json lists thousands of added tokens in some models
TEMPLATE_LIMIT_BYTES: Final = 1024 * 1024

# What is read; a change of one makes another tokenizer.
FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)

# Models whose prompts engines build by code of their own, whatever the template says.
_OWN_RENDERING: Final = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3", "kimi_audio", "inkling"})
_NAMED_TOKENS_LIMIT: Final = 256  # models name a dozen
_TEMPLATE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class BadFolder(ValueError):
    """A folder that tells too little, or what cannot be followed; the text names the file and what was expected."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`templates` by name, `default` and `tool_use` among them; `named_tokens` is what a template knows as bos_token
    and so on."""

    path: Path
    tokenizer_json: str
    templates: dict[str, str]
    named_tokens: dict[str, str]

    def template_for(self, tools: bool) -> tuple[str, str] | None:
        """Name and source of the template that a chat is rendered with."""
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return name, self.templates[name]
        return None


def is_model_folder(path: str) -> bool:
    """Whether an engine's `root` is a folder of this machine with a tokenizer."""
    return path.startswith("/") and "\0" not in path and (Path(path) / "tokenizer.json").is_file()


def read_model_folder(path: str) -> ModelFolder:
    folder = Path(path)
    if not folder.is_dir():
        raise BadFolder("not a folder")
    if any(folder.glob("tekken.json")) or any(folder.glob("tokenizer.model.v*")):
        raise BadFolder("tekken.json: engines use Mistral's own tokenizer for this model")
    model = _object(folder / "config.json", required=False)
    if model.get("model_type") in _OWN_RENDERING:
        raise BadFolder(f"config.json: engines build the prompts of {model['model_type']} by their own code")
    config = _object(folder / "tokenizer_config.json", required=False)
    older = {} if "added_tokens_decoder" in config else _object(folder / "special_tokens_map.json", required=False)
    return ModelFolder(
        folder,
        _text(folder / "tokenizer.json", TOKENIZER_LIMIT_BYTES),
        _templates(folder, config.get("chat_template")),
        _named_tokens(config | older),
    )


def _named_tokens(tokens: dict[str, Any]) -> dict[str, str]:
    """Each `*_token` by its name, those that only this model has (`image_token`) too, and `extra_special_tokens` where
    it gives names. special_tokens_map.json is of older versions, and wins where it still counts."""
    extra = tokens.get("extra_special_tokens")
    given = {name: token for name, token in tokens.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        given |= extra
    named: dict[str, str] = {}
    for name, token in given.items():
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and len(named) < _NAMED_TOKENS_LIMIT:
            named[name] = token
    return named


def _templates(folder: Path, configured: object) -> dict[str, str]:
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for entry in configured:
            name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(source, str):
                raise BadFolder("tokenizer_config.json: a chat_template without name and template")
            templates[name] = source
    elif configured is not None:
        raise BadFolder("tokenizer_config.json: chat_template is neither text nor a list")
    # Files win over the configuration, as in transformers.
    if (folder / "chat_template.jinja").is_file():
        templates = {"default": _text(folder / "chat_template.jinja", TEMPLATE_LIMIT_BYTES)}
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))[:16]:
            if _TEMPLATE_NAME.fullmatch(file.stem):
                templates[file.stem] = _text(file, TEMPLATE_LIMIT_BYTES)
    elif not templates and (folder / "chat_template.json").is_file():
        legacy = _object(folder / "chat_template.json", required=True).get("chat_template")
        if isinstance(legacy, str):
            templates["default"] = legacy
    if any(len(source) > TEMPLATE_LIMIT_BYTES for source in templates.values()):
        raise BadFolder(f"a chat template of more than {TEMPLATE_LIMIT_BYTES} bytes")
    return templates


def _text(file: Path, limit: int) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(limit + 1)
    except OSError as error:
        raise BadFolder(f"{file.name}: {error.strerror or 'unreadable'}") from None
    if len(data) > limit:
        raise BadFolder(f"{file.name}: more than {limit} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadFolder(f"{file.name}: not UTF-8") from None


def _object(file: Path, *, required: bool) -> dict[str, Any]:
    if not required and not file.is_file():
        return {}
    try:
        value = orjson.loads(_text(file, CONFIG_LIMIT_BYTES))
    except orjson.JSONDecodeError:
        raise BadFolder(f"{file.name}: not JSON") from None
    if not isinstance(value, dict):
        raise BadFolder(f"{file.name}: not an object")
    return value
