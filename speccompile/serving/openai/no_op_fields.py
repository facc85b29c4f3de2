# SPDX-License-Identifier: Apache-2.0
"""Fields that the server does not support, and their no-op values, which clients send as documented defaults.

Values that are not the default and would change the text are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NoOp:
    """Accepted values of a field that is not supported; null is one in every field."""

    reason: str  # why the server refuses other values
    values: tuple[Any, ...] = ()
    kind: type | None = None  # the field is a label: any value of this type is a no-op

    def holds(self, value: Any) -> bool:
        """Returns whether the value changes nothing."""
        if self.kind is not None and isinstance(value, self.kind):
            return True
        # True == 1 in Python, but not in JSON.
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.values)


_CACHE = NoOp("prompts are kept in memory as long as there is room", ({}, {"mode": "implicit"}))
_STORE = "nothing is stored"
_TEMPLATE = "use chat_template_kwargs where the chat template knows of it"
_TEXT = "text is all it reads and makes"
_TOKENS = "answers are texts, without special tokens and stop strings"
_TOOLS = "tools are for chats"
_USE_BEAMS = "tokens are drawn from the target's distribution alone"

LABEL = NoOp("it is a text", kind=str)
LABELS = NoOp("it holds labels by name", kind=dict)

BODY: Mapping[str, NoOp] = {
    # OpenAI's.
    "best_of": NoOp("texts are not ranked", (1,)),
    "suffix": NoOp("the target continues texts, it does not fill gaps", ("",)),
    "service_tier": NoOp("there is one tier", ("auto", "default")),
    "store": NoOp(_STORE, (False,)),
    "metadata": LABELS,
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": NoOp(_CACHE.reason, ("in_memory",)),
    "functions": NoOp("use tools", ([],)),
    "function_call": NoOp("use tool_choice", ("none", "auto")),
    "modalities": NoOp(_TEXT, (["text"],)),
    "audio": NoOp(_TEXT),
    "prediction": NoOp("the bundle's own speculator drafts"),
    "verbosity": NoOp(_TEMPLATE, ("medium",)),
    "web_search_options": NoOp("nothing is looked up"),
    "moderation": NoOp("nothing is moderated"),
    # vLLM's.
    "use_beam_search": NoOp(_USE_BEAMS, (False,)),
    "length_penalty": NoOp(_USE_BEAMS, (1,)),
    "early_stopping": NoOp(_USE_BEAMS, (False,)),
    "skip_special_tokens": NoOp(_TOKENS, (True,)),
    "spaces_between_special_tokens": NoOp(_TOKENS, (True,)),
    "include_stop_str_in_output": NoOp(_TOKENS, (False,)),
    "detokenize": NoOp(_TOKENS, (True,)),
    "return_token_ids": NoOp(_TOKENS, (False,)),
    "return_tokens_as_token_ids": NoOp(_TOKENS, (False,)),
    "truncate_prompt_tokens": NoOp("shorten the prompt yourself"),
    "priority": NoOp("requests are answered in their order", (0,)),
    "cache_salt": NoOp("kept caches are shared by all requests"),
    "logits_processors": NoOp("requests bring no code", ([],)),
    "bad_words": NoOp("forbid tokens with logit_bias", ([],)),
    "allowed_token_ids": NoOp("forbid tokens with logit_bias"),
    "vllm_xargs": NoOp("there are none of them", ({},)),
    "include_reasoning": NoOp("a message has its reasoning where the model marks it", (True,)),
    "documents": NoOp(_TEMPLATE, ([],)),
    "chat_template": NoOp("the template is the bundle's own"),
    "mm_processor_kwargs": NoOp(_TEXT, ({},)),
}

# Texts are encoded with the special tokens that the tokenizer puts around them, chats without: see vLLM's defaults.
COMPLETION: Mapping[str, NoOp] = {
    **BODY,
    "add_special_tokens": NoOp("give token ids instead of a text", (True,)),
    "tools": NoOp(_TOOLS, ([],)),
    "tool_choice": NoOp(_TOOLS, ("none", "auto")),
    "parallel_tool_calls": NoOp(_TOOLS, (True, False)),
    "top_logprobs": NoOp("completions ask by `logprobs`", (0,)),
    "continue_final_message": NoOp("it is for chats", (False,)),
    "reasoning_effort": NoOp("it is for chat templates"),
}
CHAT: Mapping[str, NoOp] = {
    **BODY,
    "add_special_tokens": NoOp("the chat template writes them", (False,)),
    "echo": NoOp("the last message can be continued: continue_final_message", (False,)),
}

# An answer's message, sent back as it came.
MESSAGE: Mapping[str, NoOp] = {
    "function_call": NoOp("use tool_calls"),
    "refusal": NoOp("put it into `content`", ("",)),
    "annotations": NoOp("put them into `content`", ([],)),
    "audio": NoOp(_TEXT),
    "reasoning": NoOp("put it into `reasoning_content`", ("",)),
}

TEXT_PART: Mapping[str, NoOp] = {
    "annotations": MESSAGE["annotations"],
    "cache_control": LABELS,
    "prompt_cache_breakpoint": LABELS,
}

IMAGE_URL: Mapping[str, NoOp] = {"detail": NoOp("every image is read at one size", ("auto",))}

STREAM_OPTIONS: Mapping[str, NoOp] = {
    "include_obfuscation": NoOp("events are not padded", (False,)),
}
