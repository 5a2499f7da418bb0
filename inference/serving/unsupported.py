"""Request fields of OpenAI, vLLM, Text Embeddings Inference and Cohere that this server does not implement: the values
that change nothing, which are accepted, and the reason that a client reads for any other value.
"""

from dataclasses import dataclass
from typing import Any

NO_TOOLS = "this server calls no tools"
NO_STATE = "this server stores no answers: send the whole conversation"
OWN_TEMPLATE = "conversations are laid out by the model's own chat template"
ANY = object()  # every value changes nothing


@dataclass(frozen=True)
class Unsupported:
    """A field that is not implemented; `neutral`: the values that change nothing."""

    why: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether this value changes nothing."""
        return ANY in self.neutral or value in self.neutral


NO_EFFECT = Unsupported("", (ANY,))

GENERATION = {
    # OpenAI
    "audio": Unsupported("answers are text"),
    "modalities": Unsupported("answers are text", (["text"],)),
    "image": Unsupported("requests are text"),
    "web_search_options": Unsupported(NO_TOOLS),
    "tools": Unsupported(NO_TOOLS, ([],)),
    "functions": Unsupported(NO_TOOLS, ([],)),
    "tool_choice": Unsupported(NO_TOOLS, ("none", "auto")),
    "function_call": Unsupported(NO_TOOLS, ("none", "auto")),
    "parallel_tool_calls": NO_EFFECT,  # of no tools
    "max_tool_calls": NO_EFFECT,
    "store": Unsupported(NO_STATE, (False,)),
    "previous_response_id": Unsupported(NO_STATE),
    "conversation": Unsupported(NO_STATE),
    "background": Unsupported(NO_STATE, (False,)),
    "background_options": Unsupported(NO_STATE, ({},)),
    "context_management": Unsupported("a conversation is read whole or refused", ([],)),
    "truncation": Unsupported("a conversation is read whole or refused", ("disabled",)),
    "include": Unsupported("log-probabilities are in /v1/chat/completions", ([],)),
    "access_programs": Unsupported("there are none here", ({},)),
    "best_of": Unsupported("every answer is returned: use n", (1,)),
    "suffix": Unsupported("write the model's own fill-in-the-middle tokens into the prompt", ("",)),
    "reasoning": Unsupported("it belongs to /v1/responses; use reasoning_effort", ({},)),
    "reasoning_effort": Unsupported("it belongs to /v1/chat/completions", ("none",)),
    "verbosity": Unsupported("it belongs to /v1/chat/completions", ("medium",)),
    "top_logprobs": Unsupported("it belongs to /v1/chat/completions; use logprobs", (0,)),
    # hints, whose values change no answer
    "prediction": NO_EFFECT,
    "service_tier": NO_EFFECT,
    "prompt_cache_key": NO_EFFECT,
    "prompt_cache_options": NO_EFFECT,
    "prompt_cache_retention": NO_EFFECT,
    # vLLM
    "add_generation_prompt": Unsupported(OWN_TEMPLATE, (True,)),
    "continue_final_message": Unsupported(OWN_TEMPLATE, (False,)),
    "chat_template": Unsupported(OWN_TEMPLATE),
    "documents": Unsupported("put them into a message or chat_template_kwargs", ([],)),
    "chat_template_kwargs": Unsupported("it belongs to /v1/chat/completions and /v1/responses", ({},)),
    "use_beam_search": Unsupported("answers are greedy or drawn", (False,)),
    "length_penalty": Unsupported("it belongs to beam search", (1, 1.0)),
    "early_stopping": Unsupported("it belongs to beam search", (False,)),
    "include_stop_str_in_output": Unsupported("an answer ends before a stop string", (False,)),
    "bad_words": Unsupported("use logit_bias", ([],)),
    "allowed_token_ids": Unsupported("use logit_bias or guided_regex"),
    "logits_processors": Unsupported("a request brings no code", ([],)),
    "prompt_logprobs": Unsupported("use echo with logprobs in /v1/completions"),
    "return_tokens_as_token_ids": Unsupported("choices of /v1/completions have token_ids", (False,)),
    "return_token_ids": Unsupported("choices of /v1/completions always have token_ids", (False,)),
    "guided_grammar": Unsupported("use guided_json, guided_regex or guided_choice"),
    "guided_whitespace_pattern": Unsupported("white space is left out of JSON"),
    "cache_salt": Unsupported("each API key has prompts of its own"),
    "kv_transfer_params": Unsupported("caches stay in their process"),
    "priority": Unsupported("a key's line in the key file sets it", (0,)),
    "detokenize": Unsupported("answers are text", (True,)),
    "spaces_between_special_tokens": NO_EFFECT,  # of the tokenizers written in Python alone
    "guided_decoding_backend": NO_EFFECT,
    "request_id": NO_EFFECT,  # the header X-Request-ID sets it
}

READING = {
    "priority": Unsupported("a key's line in the key file sets it", (0,)),
    "add_special_tokens": Unsupported("an encoder was trained with them", (True,)),
    "truncation_direction": Unsupported("the beginning of a text is kept", ("Right", "right")),
    "truncate_prompt_tokens": Unsupported("use truncate"),
    "raw_scores": Unsupported("scores are shares of 1", (False,)),
    "max_chunks_per_doc": Unsupported("a document is read as one text", (1,)),
    "max_tokens_per_doc": Unsupported("use truncate"),
    "embedding_types": Unsupported("use encoding_format", (["float"],)),
}
