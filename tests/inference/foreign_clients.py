"""Clients of OpenAI's interface whose requirements exclude each other's or ours, each as its own page says to use it.
Run by the interpreter of their environment (`make clients`): a client's name and the server's address; prints what it
got as JSON.
"""

import json
import sys
from typing import Any

PROMPT, MESSAGE = "The quick", "which word?"


def langchain(base: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    reach: Any = {"base_url": base, "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(model="gpt", temperature=0, max_tokens=8, **reach)
    # it would cut a text by OpenAI's own tokenizer otherwise
    vectors = OpenAIEmbeddings(model="bert", check_embedding_ctx_length=False, **reach)
    answer = chat.invoke(MESSAGE)
    return {
        "completion": OpenAI(model="gpt", temperature=0, max_tokens=8, **reach).invoke(PROMPT),
        "chat": answer.content,
        "tokens": answer.usage_metadata["output_tokens"],
        "stream": "".join(part.content for part in chat.stream(MESSAGE)),
        "vectors": vectors.embed_documents(["a model", "text"]),
    }


def llamaindex(base: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    reach: Any = {"model": "gpt", "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 8}
    reach |= {"context_window": 160, "max_retries": 0}
    chat, messages = OpenAILike(is_chat_model=True, **reach), [ChatMessage(role="user", content=MESSAGE)]
    return {
        "completion": OpenAILike(is_chat_model=False, **reach).complete(PROMPT).text,
        "chat": chat.chat(messages).message.content,
        "stream": "".join(part.delta or "" for part in chat.stream_chat(messages)),
    }


def litellm(base: str) -> dict[str, Any]:
    import litellm

    reach: Any = {"api_base": base, "api_key": "none", "num_retries": 0}
    asked = {"model": "openai/gpt", "temperature": 0, "max_tokens": 8, **reach}
    messages = [{"role": "user", "content": MESSAGE}]
    answer = litellm.completion(messages=messages, **asked)
    parts = litellm.completion(messages=messages, stream=True, **asked)
    completion = litellm.text_completion(**asked | {"model": "text-completion-openai/gpt"}, prompt=PROMPT)
    vectors = litellm.embedding(model="openai/bert", input=["a model", "text"], **reach)
    return {
        "completion": completion.choices[0].text,
        "chat": answer.choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
        "stream": "".join(part.choices[0].delta.content or "" for part in parts),
        "vectors": [one["embedding"] for one in vectors.data],
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
