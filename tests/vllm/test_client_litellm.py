"""litellm as a library works through the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.litellm_library import close_what_it_left, litellm
from tests.vllm.engines import MODEL

# its own and its dependencies' deprecations are not ours to mend
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

MESSAGES = [{"role": "user", "content": "What does os.path.join do? Größe, 路径, 🛣"}]


@pytest.fixture(autouse=True, scope="module")
def tidy() -> Iterator[None]:
    yield
    close_what_it_left()


def asked(base_url: str, model: str = f"hosted_vllm/{MODEL}", **fields: Any) -> dict[str, Any]:
    known = {"api_base": f"{base_url}/v1", "api_key": "none", "messages": MESSAGES, "max_retries": 0, "timeout": 60}
    return {"model": model, "temperature": 0, "max_tokens": 10, **known, **fields}


@pytest.mark.asyncio
async def test_completions_plain_streamed_and_async(base_url: str) -> None:
    plain = litellm.completion(**asked(base_url))
    text = plain.choices[0].message.content
    assert text
    assert plain.usage.completion_tokens == 10
    chunks = list(litellm.completion(**asked(base_url, stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens
    answer = await litellm.acompletion(**asked(base_url))
    assert answer.choices[0].message.content == text
    stream = await litellm.acompletion(**asked(base_url, stream=True))
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


def test_errors_are_of_the_right_class(base_url: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="no-such-model"):
        litellm.completion(**asked(base_url, model="openai/no-such-model"))
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked(base_url, max_tokens=1_000_000))
    with pytest.raises(litellm.NotFoundError):  # a model that generates embeds nothing
        litellm.embedding(model=f"hosted_vllm/{MODEL}", input=["text"], api_base=f"{base_url}/v1", api_key="none")
