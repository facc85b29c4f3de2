# SPDX-License-Identifier: Apache-2.0
"""Fields that the server does not support, and the values of them that ask for nothing.

Clients, front ends and their settings files send the defaults of OpenAI's API and of vLLM's server. A value that is the
documented default, or that has no influence on the text, is accepted; any other is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Neutral:
    """Values that ask for nothing in a field that is not supported. null does so in every field.

    Args:
        kind: any value of this type is accepted: the field is a label.
    """

    reason: str
    values: tuple[Any, ...] = ()
    kind: type | None = None

    def holds(self, value: Any) -> bool:
        """Returns True where the value asks for nothing."""
        if self.kind is not None and isinstance(value, self.kind):
            return True
        # True == 1 in Python, but not in JSON.
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.values)


_CACHE = Neutral("prompts are kept in memory as long as there is room", ({}, {"mode": "implicit"}))
_STORE = "nothing is stored"
_TEMPLATE = "use chat_template_kwargs where the chat template knows of it"
_TEXT = "text is all it reads and makes"
_TOKENS = "answers are texts, without special tokens and stop strings"
_TOOLS = "tools are for chats"
_USE_BEAMS = "tokens are drawn from the target's distribution alone"

LABEL = Neutral("it is a text", kind=str)
LABELS = Neutral("it holds labels by name", kind=dict)

BODY: Mapping[str, Neutral] = {
    # OpenAI's.
    "best_of": Neutral("texts are not ranked", (1,)),
    "suffix": Neutral("the target continues texts, it does not fill gaps", ("",)),
    "service_tier": Neutral("there is one tier", ("auto", "default")),
    "store": Neutral(_STORE, (False,)),
    "metadata": LABELS,
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": Neutral(_CACHE.reason, ("in_memory",)),
    "functions": Neutral("use tools", ([],)),
    "function_call": Neutral("use tool_choice", ("none", "auto")),
    "modalities": Neutral(_TEXT, (["text"],)),
    "audio": Neutral(_TEXT),
    "prediction": Neutral("the bundle's own speculator drafts"),
    "verbosity": Neutral(_TEMPLATE, ("medium",)),
    "web_search_options": Neutral("nothing is looked up"),
    "moderation": Neutral("nothing is moderated"),
    # vLLM's.
    "use_beam_search": Neutral(_USE_BEAMS, (False,)),
    "length_penalty": Neutral(_USE_BEAMS, (1,)),
    "early_stopping": Neutral(_USE_BEAMS, (False,)),
    "skip_special_tokens": Neutral(_TOKENS, (True,)),
    "spaces_between_special_tokens": Neutral(_TOKENS, (True,)),
    "include_stop_str_in_output": Neutral(_TOKENS, (False,)),
    "detokenize": Neutral(_TOKENS, (True,)),
    "return_token_ids": Neutral(_TOKENS, (False,)),
    "return_tokens_as_token_ids": Neutral(_TOKENS, (False,)),
    "truncate_prompt_tokens": Neutral("shorten the prompt yourself"),
    "priority": Neutral("requests are answered in their order", (0,)),
    "cache_salt": Neutral("kept caches are shared by all requests"),
    "logits_processors": Neutral("requests bring no code", ([],)),
    "bad_words": Neutral("forbid tokens with logit_bias", ([],)),
    "allowed_token_ids": Neutral("forbid tokens with logit_bias"),
    "vllm_xargs": Neutral("there are none of them", ({},)),
    "include_reasoning": Neutral("a message has its reasoning where the model marks it", (True,)),
    "documents": Neutral(_TEMPLATE, ([],)),
    "chat_template": Neutral("the template is the bundle's own"),
    "mm_processor_kwargs": Neutral(_TEXT, ({},)),
}

# Texts are encoded with the special tokens that the tokenizer puts around them, chats without: see vLLM's defaults.
COMPLETION: Mapping[str, Neutral] = {
    **BODY,
    "add_special_tokens": Neutral("give token ids instead of a text", (True,)),
    "tools": Neutral(_TOOLS, ([],)),
    "tool_choice": Neutral(_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Neutral(_TOOLS, (True, False)),
    "top_logprobs": Neutral("completions ask by `logprobs`", (0,)),
    "continue_final_message": Neutral("it is for chats", (False,)),
    "reasoning_effort": Neutral("it is for chat templates"),
}
CHAT: Mapping[str, Neutral] = {
    **BODY,
    "add_special_tokens": Neutral("the chat template writes them", (False,)),
    "echo": Neutral("the last message can be continued: continue_final_message", (False,)),
}

# An answer's message, sent back as it came.
MESSAGE: Mapping[str, Neutral] = {
    "function_call": Neutral("use tool_calls"),
    "refusal": Neutral("put it into `content`", ("",)),
    "annotations": Neutral("put them into `content`", ([],)),
    "audio": Neutral(_TEXT),
    "reasoning": Neutral("put it into `reasoning_content`", ("",)),
}

TEXT_PART: Mapping[str, Neutral] = {
    "annotations": MESSAGE["annotations"],
    "cache_control": LABELS,
    "prompt_cache_breakpoint": LABELS,
}

IMAGE_URL: Mapping[str, Neutral] = {"detail": Neutral("every image is read at one size", ("auto",))}

STREAM_OPTIONS: Mapping[str, Neutral] = {
    "include_obfuscation": Neutral("events are not padded", (False,)),
}


def drop_neutral(data: Any, fields: Mapping[str, Neutral]) -> Any:
    """Returns a JSON object without its nulls, and without the fields that ask for nothing.

    Raises:
        PydanticCustomError: one of these asks for something.
    """
    if not isinstance(data, dict):
        return data
    given = {name: value for name, value in data.items() if value is not None}
    for name in fields.keys() & given.keys():
        if not fields[name].holds(given[name]):
            facts = {"param": name, "reason": fields[name].reason}
            raise PydanticCustomError("unsupported_field", "it is not supported: {reason}", facts)
        del given[name]
    return given
