from __future__ import annotations

import gc
from array import array

import pytest
from tokenizers import Tokenizer

from router.tokens.answers import Refused, Why
from router.tokens.local import LocalTokenizer, LocalTokenizers, first_difference
from router.tokens.model_folder import BadFolder, read_model_folder
from router.tokens.question import CHAT_PATH, ChatPrompt, TextPrompt, read_prompt
from router.tokens.segment_cache import SegmentCache
from tests.support.tokenizer_folders import BEGIN, KINDS, SPECIAL, tokenizer_of, write_folder

TURN = "The quick brown fox jumps over the lazy dog, and the dog didn't mind at all. "


def local_of(tmp_path, kind="byte-level", limit=1 << 20, **options):
    folder = read_model_folder(str(write_folder(tmp_path / kind, kind)))
    return LocalTokenizer(folder, SegmentCache(limit), **options)


def conversation(turns):
    messages = []
    for n in range(turns):
        messages += [
            {"role": "user", "content": f"{n}: {TURN * 5}"},
            {"role": "assistant", "content": f"Grüße {n}! {TURN * 5}"},
        ]
    return ChatPrompt([*messages, {"role": "user", "content": "go on"}], None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_conversation_tokenizes_only_its_new_turns(tmp_path, kind):
    local = local_of(tmp_path, kind)
    assert not local.cache_off
    whole = Tokenizer.from_file(str(tmp_path / kind / "tokenizer.json"))
    before = 0
    for turns in range(1, 6):
        prompt = conversation(turns)
        answer = local.tokenize(prompt)
        assert answer.ids.tolist() == whole.encode(local.render(prompt), add_special_tokens=False).ids
        assert answer.cached >= before - 60, "all but the end of what was tokenized before was found again"
        before = len(answer.ids)


def test_completions_get_what_the_tokenizer_puts_around_them(tmp_path):
    local = local_of(tmp_path, "begin")
    whole = tokenizer_of("begin")
    for text in ("x", f"{TURN * 9}<|im_end|>{TURN * 9}"):
        for special in (True, False):
            ids = local.tokenize(TextPrompt(text, special)).ids.tolist()
            assert ids == whole.encode(text, add_special_tokens=special).ids
    assert local.tokenize(TextPrompt("x")).ids[0] == SPECIAL.index(BEGIN)


def test_what_the_file_says_of_truncation_and_padding_does_not_count(tmp_path):
    path = write_folder(tmp_path / "m")
    tokenizer = tokenizer_of("byte-level")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(path / "tokenizer.json"))
    local = LocalTokenizer(read_model_folder(str(path)), SegmentCache(1 << 20))
    assert local.tokenize(TextPrompt(TURN)).ids.tolist() == tokenizer_of("byte-level").encode(TURN).ids


def test_a_sample_that_differs_turns_the_cache_off_and_gives_the_whole(tmp_path, caplog):
    local = local_of(tmp_path, sample_every=2)
    prompt = conversation(2)
    whole = local.tokenize(prompt).ids
    cache = local._cache
    for key, ids in list(cache._entries.items()):  # as if the seams had been wrong
        cache._entries[key] = array("I", [token + 1 for token in ids])
    assert local.tokenize(prompt).ids != whole
    assert local.tokenize(prompt).ids == whole
    assert "first at token 0" in local.cache_off
    assert "the tokenization cache is off" in caplog.text
    assert "quick brown" not in caplog.text
    answer = local.tokenize(prompt)
    assert (answer.ids, answer.cached) == (whole, 0)


def test_samples_that_agree_leave_the_cache_on(tmp_path):
    local = local_of(tmp_path, sample_every=1)
    first = local.tokenize(conversation(2))
    again = local.tokenize(conversation(2))
    assert first.ids == again.ids
    assert again.cached > 0
    assert not local.cache_off


def test_a_template_that_takes_too_long_is_not_tried_again(tmp_path, caplog):
    endless = "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    folder = read_model_folder(str(write_folder(tmp_path / "m", template=endless)))
    local = LocalTokenizer(folder, SegmentCache(1 << 20), time_limit_s=0.01)
    prompt = ChatPrompt([{"role": "user", "content": "x"}], None)
    for why in (Why.TOO_BIG, Why.OFF):
        with pytest.raises(Refused) as caught:
            local.tokenize(prompt)
        assert caught.value.why is why
    assert "takes too long" in local.state()["chats"]
    assert caplog.text.count("local chat rendering is off") == 1
    assert local.tokenize(TextPrompt("completions go on")).ids


@pytest.mark.parametrize(
    "request_",
    [
        ChatPrompt([{"role": "user", "content": "x" * 70_000}], None),
        ChatPrompt([{"role": "user", "content": "x"}] * 101, None),
    ],
)
def test_a_large_request_cannot_turn_a_template_off(tmp_path, request_):
    slow = "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    folder = read_model_folder(str(write_folder(tmp_path / "m", template=slow)))
    local = LocalTokenizer(folder, SegmentCache(1 << 20), time_limit_s=0.01)
    with pytest.raises(Refused) as caught:
        local.tokenize(request_)
    assert caught.value.why is Why.TOO_BIG
    assert not local.off


def test_a_request_that_is_nested_deeply_is_refused_and_nothing_is_turned_off(tmp_path):
    local = local_of(tmp_path)
    nested = b'{"a":' * 900 + b"1" + b"}" * 900
    tool = b'[{"type":"function","function":{"name":"f","parameters":' + nested + b"}}]"
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":' + tool + b"}"
    with pytest.raises(Refused) as caught:
        local.tokenize(read_prompt(CHAT_PATH, body))
    assert caught.value.why in (Why.TOO_BIG, Why.SHAPE)
    assert not local.off


def test_a_text_may_be_as_long_as_the_bound(tmp_path):
    local = local_of(tmp_path, max_chars=1000)
    assert local.tokenize(TextPrompt("x" * 1000)).ids
    with pytest.raises(Refused) as caught:
        local.tokenize(TextPrompt("x" * 1001))
    assert caught.value.why is Why.TOO_BIG


def test_a_folder_without_a_template_tokenizes_completions_only(tmp_path):
    path = write_folder(tmp_path / "m", template=None)
    local = LocalTokenizer(read_model_folder(str(path)), SegmentCache(1 << 20))
    assert local.tokenize(TextPrompt("x")).ids
    with pytest.raises(Refused) as caught:
        local.tokenize(ChatPrompt([{"role": "user", "content": "x"}], None))
    assert caught.value.why is Why.OFF


@pytest.mark.parametrize("content", ["{", "{}", '{"version": "9", "model": {"type": "new"}}'])
def test_a_tokenizer_file_that_cannot_be_read(tmp_path, content):
    path = write_folder(tmp_path / "m")
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(BadFolder, match=r"tokenizer\.json"):
        LocalTokenizer(read_model_folder(str(path)), SegmentCache(1 << 20))


def test_a_template_that_does_not_compile_is_a_bad_folder(tmp_path):
    path = write_folder(tmp_path / "m", template="{% if %}")
    with pytest.raises(BadFolder, match="does not compile"):
        LocalTokenizer(read_model_folder(str(path)), SegmentCache(1 << 20))


def test_the_first_difference():
    assert first_difference(array("I", [1, 2]), array("I", [1, 3])) == 1
    assert first_difference(array("I", [1]), array("I", [1, 3])) == 1


def test_models_of_one_folder_share_a_tokenizer_until_its_files_change(tmp_path):
    path = write_folder(tmp_path / "m")
    tokenizers = LocalTokenizers(SegmentCache(1 << 20))
    first = tokenizers.get(str(path))
    assert tokenizers.get(str(path)) is first
    (path / "chat_template.jinja").write_text("changed")
    second = tokenizers.get(str(path))
    assert second is not first
    assert len(tokenizers) == 2
    del first, second
    gc.collect()
    assert len(tokenizers) == 0


def test_a_prompt_without_tokens_is_refused_as_engines_do(tmp_path):
    bare = LocalTokenizer(read_model_folder(str(write_folder(tmp_path / "bare"))), SegmentCache(1 << 20))
    with pytest.raises(Refused) as caught:
        bare.tokenize(TextPrompt(""))
    assert caught.value.why is Why.SHAPE
    begun = LocalTokenizer(read_model_folder(str(write_folder(tmp_path / "begin", "begin"))), SegmentCache(1 << 20))
    assert begun.tokenize(TextPrompt("")).ids.tolist() == [SPECIAL.index(BEGIN)]
