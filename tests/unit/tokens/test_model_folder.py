from __future__ import annotations

import json

import pytest

from router.tokens import model_folder
from router.tokens.model_folder import BadFolder, is_model_folder, read_model_folder
from tests.support.tokenizer_folders import write_folder


def test_a_template_and_the_named_tokens(tmp_path):
    folder = read_model_folder(str(write_folder(tmp_path / "m", template="T")))
    assert folder.template_for(tools=True) == ("default", "T")
    assert folder.named_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|begin|>"}


def test_tokens_of_one_model_have_their_names_too(tmp_path):
    path = write_folder(
        tmp_path / "m",
        image_token={"content": "<image>", "lstrip": False},
        add_bos_token=True,
        extra_special_tokens={"video_token": "<video>", "odd": 5},
    )
    assert read_model_folder(str(path)).named_tokens == {
        "eos_token": "<|im_end|>",
        "bos_token": "<|begin|>",
        "image_token": "<image>",
        "video_token": "<video>",
    }


@pytest.mark.parametrize(("newer", "eos"), [({}, "</s>"), ({"added_tokens_decoder": {}}, "<|im_end|>")])
def test_the_older_file_of_named_tokens_wins_where_it_still_counts(tmp_path, newer, eos):
    path = write_folder(tmp_path / "m", extra_special_tokens=["<a>"], **newer)
    (path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert read_model_folder(str(path)).named_tokens["eos_token"] == eos


def test_named_tokens_are_bounded(tmp_path):
    many = {f"t{n}_token": "x" for n in range(model_folder._NAMED_TOKENS_LIMIT + 5)}
    folder = read_model_folder(str(write_folder(tmp_path / "m", **many)))
    assert len(folder.named_tokens) == model_folder._NAMED_TOKENS_LIMIT


def test_a_list_of_named_templates(tmp_path):
    named = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "U"},
        {"name": "rag", "template": "R"},
    ]
    folder = read_model_folder(str(write_folder(tmp_path / "m", template=named)))
    assert folder.template_for(tools=True) == ("tool_use", "U")
    assert folder.template_for(tools=False) == ("default", "D")


def test_a_template_file_wins(tmp_path):
    path = write_folder(tmp_path / "m", template="from the configuration")
    (path / "chat_template.jinja").write_text("from the file\n")
    assert read_model_folder(str(path)).template_for(tools=False) == ("default", "from the file\n")


def test_a_template_in_a_file_of_its_own_json(tmp_path):
    path = write_folder(tmp_path / "m", template=None)
    (path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert read_model_folder(str(path)).template_for(tools=False) == ("default", "J")


def test_no_template(tmp_path):
    assert read_model_folder(str(write_folder(tmp_path / "m", template=None))).template_for(tools=False) is None


def test_an_engines_root_is_used_only_if_it_is_a_folder_of_this_machine(tmp_path):
    path = write_folder(tmp_path / "m")
    assert is_model_folder(str(path))
    for root in ("org/model", "", "./m", str(tmp_path), f"{path}\0"):
        assert not is_model_folder(root)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: not an object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is neither"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "without name and template"),
        ("tekken.json", "{}", "Mistral's own tokenizer"),
        ("tokenizer.model.v3", "", "Mistral's own tokenizer"),
        ("config.json", '{"model_type": "gpt_oss"}', "gpt_oss by their own code"),
    ],
)
def test_a_folder_that_cannot_be_followed(tmp_path, file, content, message):
    path = write_folder(tmp_path / "m")
    (path / file).write_text(content)
    with pytest.raises(BadFolder, match=message):
        read_model_folder(str(path))


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(BadFolder, match="not a folder"):
        read_model_folder(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFolder, match=r"tokenizer\.json: No such file"):
        read_model_folder(str(tmp_path / "empty"))


def test_files_are_read_up_to_their_bound(tmp_path, monkeypatch):
    path = write_folder(tmp_path / "m", template=None)
    size = (path / "tokenizer.json").stat().st_size
    monkeypatch.setattr(model_folder, "TOKENIZER_LIMIT_BYTES", size)
    read_model_folder(str(path))
    monkeypatch.setattr(model_folder, "TOKENIZER_LIMIT_BYTES", size - 1)
    with pytest.raises(BadFolder, match="more than"):
        read_model_folder(str(path))
    monkeypatch.undo()
    monkeypatch.setattr(model_folder, "TEMPLATE_LIMIT_BYTES", 9)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x" * 10}))
    with pytest.raises(BadFolder, match="template of more than"):
        read_model_folder(str(path))
