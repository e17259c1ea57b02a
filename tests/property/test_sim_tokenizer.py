"""The simulated tokenizer and answers: prefix-stable, about 4 bytes a token, the same ids on the way back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.sim import answers, chat_template
from router.sim.engine_model import Finish
from router.sim.tokenizer import VOCABULARY, block_hashes, tokenize_segments, tokenize_text


@given(text=st.binary(max_size=200), cut=st.integers(0, 200))
def test_tokens_of_a_prefix_are_a_prefix_but_for_the_last(text: bytes, cut: int) -> None:
    whole, part = tokenize_text(text), tokenize_text(text[:cut])
    assert list(part[:-1]) == list(whole[: max(len(part) - 1, 0)])
    assert len(whole) == -(-len(text) // 4)
    assert all(0 <= token < VOCABULARY for token in whole)


@given(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 60))
def test_an_answer_has_the_same_ids_when_it_comes_back(seed: int, count: int) -> None:
    answer = answers.words(seed, count, Finish.LENGTH)
    text = "".join(answer.pieces)
    assert len(answer) == count
    assert answer.tokens == tokenize_text(text.encode())
    messages = [{"role": "user", "content": "question"}]
    prompt = tokenize_segments(chat_template.render(messages))
    turns = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "next"}]
    following = tokenize_segments(chat_template.render(turns))
    assert following[: len(prompt) + count] == prompt + answer.tokens


@given(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 40), at=st.integers(0, 100), length=st.integers(1, 9))
def test_a_stop_string_ends_the_answer_and_is_not_shown(seed: int, count: int, at: int, length: int) -> None:
    whole = "".join(answers.words(seed, count, Finish.LENGTH).pieces)
    stop = whole[at : at + length] or "never"
    answer = answers.words(seed, count, Finish.LENGTH, ["", stop])
    text = "".join(answer.pieces)
    if stop in whole:
        assert text == whole[: whole.index(stop)]
        assert (answer.finish, answer.stop) == (Finish.STOP, stop)
        assert len(answer.pieces) == len(answer)
    else:
        assert (text, answer.finish, answer.stop) == (whole, Finish.LENGTH, None)


@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=80), size=st.integers(1, 20))
def test_block_hashes_chain(tokens: list[int], size: int) -> None:
    hashes = block_hashes(tokens, size)
    assert len(hashes) == len(tokens) // size
    assert block_hashes(tokens[: len(tokens) // 2], size) == hashes[: len(tokens) // 2 // size]
    assert not set(hashes) & set(block_hashes(tokens, size, b"other"))
    if hashes:
        changed = [(tokens[0] + 1) % VOCABULARY, *tokens[1:]]
        assert not set(hashes) & set(block_hashes(changed, size))


@given(st.text(max_size=50), st.text(max_size=50))
def test_parts_are_one_text(first: str, second: str) -> None:
    parts = [{"type": "text", "text": first}, {"type": "text", "text": second}]
    as_parts = chat_template.render([{"role": "user", "content": parts}])
    as_text = chat_template.render([{"role": "user", "content": f"{first}\n{second}"}])
    assert tokenize_segments(as_parts) == tokenize_segments(as_text)
