"""The table of parameters: every one that OpenAI, vLLM, SGLang, llama.cpp or LiteLLM has for chat, completions and
tokenizing, with what is done with it here. `gateway/schema/parameters.py` reads bodies by it, and `make parameters`
writes the tables of docs/api.md from it.

A test holds the honoured ones against the fields of the bodies' structs, so that neither can be without the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Endpoint = Literal["chat", "completions", "tokenize", "detokenize"]
Treatment = Literal["honoured", "no effect", "refused"]
Origin = Literal["OpenAI", "vLLM", "SGLang", "llama.cpp", "LiteLLM", "Headgate"]

CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
TOKENIZE: tuple[Endpoint, ...] = ("tokenize",)
PROMPT: tuple[Endpoint, ...] = ("chat", "completions", "tokenize")
MESSAGES: tuple[Endpoint, ...] = ("chat", "tokenize")
ALL: tuple[Endpoint, ...] = ("chat", "completions", "tokenize", "detokenize")

Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""A text that a response stores and repeats, though no prompt has it."""

_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class Parameter:
    path: str
    """The name in the body; a part of an object is written `object.part`."""
    endpoints: tuple[Endpoint, ...]
    origin: Origin
    treatment: Treatment
    note: str = ""
    """Honoured: the rule. No effect: the reason. Refused: the replacement."""
    off: tuple[Any, ...] = ()
    """The parameter's own default, or other values that change nothing, beside the usual empty ones. With True among
    them, False is no empty value: it changes something.
    """
    empty_counts: bool = False
    """An empty value means something: only null is absent."""
    kind: Any = Any
    """The type to check where the parameter has no effect."""

    def is_off(self, item: Any) -> bool:
        """Returns whether the value asks for nothing: absent, switched off, or the default."""
        if item is None:
            return True
        if self.off and _is_among(item, self.off):
            return True
        if self.empty_counts or (item is False and True in self.off):
            return False
        return not item and _is_among(item, _EMPTY)


def _is_among(item: Any, others: tuple[Any, ...]) -> bool:
    """Compares a JSON value with others: true is not 1, and 1 is 1.0."""
    is_bool = item is True or item is False
    return any(item == other and (other is True or other is False) == is_bool for other in others)


def _honoured(
    path: str,
    endpoints: tuple[Endpoint, ...],
    origin: Origin,
    note: str,
    *,
    off: tuple[Any, ...] = (),
    empty_counts: bool = False,
) -> Parameter:
    return Parameter(path, endpoints, origin, "honoured", note, off, empty_counts)


def _idle(path: str, endpoints: tuple[Endpoint, ...], origin: Origin, kind: Any, note: str = "") -> Parameter:
    return Parameter(path, endpoints, origin, "no effect", note, kind=kind)


def _refused(
    path: str,
    endpoints: tuple[Endpoint, ...],
    origin: Origin,
    note: str = "",
    *,
    off: tuple[Any, ...] = (),
    empty_counts: bool = False,
) -> Parameter:
    return Parameter(path, endpoints, origin, "refused", note, off, empty_counts)


_TEXT_ONLY = "Only text is served."
_OWN_TEMPLATE = "The model's own template is used."
_ONE_FORM = "Use 'structured_outputs' instead."
_IN_LOGPROBS = "Use 'logprobs' instead."
_BY_HEADER = "Ids are our own; the answer repeats a header 'x-client-request-id'."
_ADAPTER = "Name the adapter in 'model', as '<model>:<adapter>'."
_ROUTED = "The gateway chooses the worker."
_IN_USAGE = "'usage' and 'headgate' of the answer have the counts and times."
_NO_CHAIN = "The samplers are top_k, top_p and min_p, in this order, after the temperature."
_ALWAYS_THERE = "It has no meaning without the parameter that switches its sampler on, which is refused."

_REQUEST = (
    _honoured("model", ALL, "OpenAI", "A served model, or '<model>:<adapter>'.", empty_counts=True),
    _honoured("messages", MESSAGES, "OpenAI", "1 to 10,000 messages of text.", empty_counts=True),
    _honoured(
        "prompt", COMPLETIONS, "OpenAI", "Text, texts, token ids or lists of ids; at most 128.", empty_counts=True
    ),
    _honoured("prompt", TOKENIZE, "vLLM", "Text; exactly one of 'prompt' and 'messages'.", empty_counts=True),
    _honoured("tokens", ("detokenize",), "vLLM", "Token ids of the vocabulary.", empty_counts=True),
    _honoured("max_tokens", PROMPT, "OpenAI", "Chat: 1 and more; completions: 16, 0 with 'echo' alone."),
    _honoured("max_completion_tokens", PROMPT, "OpenAI", "As 'max_tokens', over which it wins."),
    _honoured("truncate", BOTH, "Headgate", "true: the output gets the room that the prompt leaves, instead of a 400."),
    _honoured(
        "truncate_prompt_tokens",
        PROMPT,
        "vLLM",
        "Keeps so many tokens of each prompt; -1: as many as the context has beside the output.",
    ),
    _honoured("truncation_side", PROMPT, "vLLM", "'left' (default) cuts the beginning, 'right' the end."),
    _honoured(
        "add_special_tokens",
        PROMPT,
        "vLLM",
        "The tokens that the tokenizer itself begins and ends a text with. Default: true, for messages false.",
        off=(True,),
    ),
    _honoured(
        "add_generation_prompt", MESSAGES, "vLLM", "false: the prompt ends with the last message.", empty_counts=True
    ),
    _honoured(
        "continue_final_message",
        MESSAGES,
        "vLLM",
        "The answer continues the last message, which is the assistant's; not with 'add_generation_prompt': true.",
    ),
    _honoured("n", BOTH, "OpenAI", "1 to 128, at most as many as a worker runs at once."),
    _honoured("best_of", COMPLETIONS, "OpenAI", "'n' to 128; above 'n' not with 'stream'."),
    _honoured("best_of", CHAT, "vLLM", "The width of a beam search, at most 8; otherwise refused.", off=(1,)),
    _honoured("use_beam_search", BOTH, "vLLM", "Of at most 8 beams; not with 'stream' or sampling fields."),
    _honoured("length_penalty", BOTH, "vLLM", "-10 to 10, of a beam search.", off=(1,)),
    _honoured("stream", BOTH, "OpenAI", "Events instead of a body."),
    _honoured("stream_options", BOTH, "OpenAI", "Needs 'stream'."),
    _honoured("stream_options.include_usage", BOTH, "OpenAI", "A last event with the usage."),
    _honoured(
        "stream_options.continuous_usage_stats", BOTH, "vLLM", "Each event has the usage so far; needs 'include_usage'."
    ),
    _honoured("service_tier", BOTH, "OpenAI", "'auto', 'default', 'priority', 'fast', 'scale'; not 'flex'."),
    _honoured(
        "metadata", BOTH, "OpenAI", "16 pairs, keys to 64, values to 512 characters; repeated.", empty_counts=True
    ),
    _honoured("prompt_cache_key", BOTH, "OpenAI", "Names the conversation."),
    _honoured("cache_salt", BOTH, "vLLM", "1 to 1,024 characters; divides the caller's own cache."),
    _honoured("modalities", CHAT, "OpenAI", "['text'] only."),
)
_SAMPLING = (
    _honoured("temperature", BOTH, "OpenAI", "0 to 2; default: the model's generation config."),
    _honoured("top_p", BOTH, "OpenAI", "0 to 1; default: the model's."),
    _honoured("top_k", BOTH, "vLLM", "-1 and more; 0 and -1 mean off; default: the model's."),
    _honoured("min_p", BOTH, "vLLM", "0 to 1; default: the model's."),
    _honoured("presence_penalty", BOTH, "OpenAI", "-2 to 2, over the output."),
    _honoured("frequency_penalty", BOTH, "OpenAI", "-2 to 2, over the output."),
    _honoured("repetition_penalty", BOTH, "vLLM", "0.01 to 2, over prompt and output; default: the model's."),
    _honoured("logit_bias", BOTH, "OpenAI", "Up to 1,024 ids, -100 to 100."),
    _honoured("seed", BOTH, "OpenAI", "An integer of 64 bits; each choice derives its own from it."),
    _honoured("stop", BOTH, "OpenAI", "Up to 16 strings of 1 to 256 characters."),
    _honoured("stop_token_ids", BOTH, "vLLM", "Up to 128 ids."),
    _honoured("include_stop_str_in_output", BOTH, "vLLM", "The text keeps what ended it."),
    _honoured("skip_special_tokens", BOTH, "vLLM", "false: the text shows control tokens.", off=(True,)),
    _honoured("ignore_eos", BOTH, "vLLM", "The model's end does not end the text; beside a form it has no effect."),
    _honoured("min_tokens", BOTH, "vLLM", "No end before so many tokens.", off=(0,)),
    _honoured("bad_words", BOTH, "vLLM", "Up to 128 words."),
    _honoured("allowed_token_ids", BOTH, "vLLM", "Up to 16,384 ids."),
)
_LOGPROBS = (
    _honoured("logprobs", CHAT, "OpenAI", "true: the logprob of each token, from the raw logits."),
    _honoured("logprobs", COMPLETIONS, "OpenAI", "0 to 20 alternatives beside the drawn token."),
    _honoured("top_logprobs", CHAT, "OpenAI", "0 to 20 alternatives; needs 'logprobs'.", off=(0,)),
    _honoured("logprob_token_ids", BOTH, "vLLM", "Up to 128 ids whose logprobs take the place of the best ones'."),
    _honoured("prompt_logprobs", BOTH, "vLLM", "0 to 20 alternatives for each token of the prompt; not with 'stream'."),
    _honoured("echo", COMPLETIONS, "OpenAI", "The prompt in front of the text, with its logprobs."),
    _honoured("echo", CHAT, "vLLM", "The last message in front of the answer, if it is the assistant's."),
    _honoured("return_token_ids", BOTH, "vLLM", "'prompt_token_ids', and 'token_ids' of each choice or chunk."),
    _honoured("return_tokens_as_token_ids", BOTH, "vLLM", "Logprobs name tokens as 'token_id:<id>'."),
    _honoured("return_token_strs", TOKENIZE, "vLLM", "false: without 'token_strs'.", off=(True,)),
)
_FORMS = (
    _honoured("response_format", BOTH, "OpenAI", "One form per request, from whichever parameter."),
    _honoured("response_format.type", BOTH, "OpenAI", "'text', 'json_object', 'json_schema'.", empty_counts=True),
    _honoured("response_format.json_schema", BOTH, "OpenAI", "A name and a schema.", empty_counts=True),
    _honoured(
        "response_format.json_schema.name", BOTH, "OpenAI", "1 to 64 letters, digits, '_', '-'.", empty_counts=True
    ),
    _honoured("response_format.json_schema.schema", BOTH, "OpenAI", "Absent: any JSON.", empty_counts=True),
    _honoured("response_format.json_schema.strict", BOTH, "OpenAI", "Enforced whether it is set or not."),
    _idle("response_format.json_schema.description", BOTH, "OpenAI", str, "The model does not see it."),
    _honoured("response_format.schema", BOTH, "llama.cpp", "Without 'json_schema': the schema.", empty_counts=True),
    _honoured("structured_outputs", BOTH, "vLLM", "Exactly one of its parts."),
    _honoured("structured_outputs.json", BOTH, "vLLM", "A schema, or its text.", empty_counts=True),
    _honoured("structured_outputs.regex", BOTH, "vLLM", "An expression for the whole text."),
    _honoured("structured_outputs.choice", BOTH, "vLLM", "1 to 1,024 texts."),
    _honoured("structured_outputs.grammar", BOTH, "vLLM", "EBNF with a rule 'root'."),
    _honoured("structured_outputs.json_object", BOTH, "vLLM", "true: any object."),
    _idle(
        "structured_outputs.disable_any_whitespace",
        BOTH,
        "vLLM",
        bool,
        "JSON has at most one space after ',' and ':' anyway.",
    ),
    _refused(
        "structured_outputs.disable_additional_properties", BOTH, "vLLM", "Write 'additionalProperties' in the schema."
    ),
    _refused("structured_outputs.whitespace_pattern", BOTH, "vLLM"),
    _refused("structured_outputs.structural_tag", BOTH, "vLLM", "Use 'grammar' instead."),
    _honoured("grammar", BOTH, "llama.cpp", "As 'structured_outputs.grammar'."),
    _honoured("json_schema", BOTH, "llama.cpp", "As 'structured_outputs.json'.", empty_counts=True),
    _honoured("ebnf", BOTH, "SGLang", "As 'structured_outputs.grammar'."),
    _honoured("regex", BOTH, "SGLang", "As 'structured_outputs.regex'."),
    _refused("guided_json", BOTH, "vLLM", "Use 'structured_outputs.json' instead.", empty_counts=True),
    _refused("guided_regex", BOTH, "vLLM", "Use 'structured_outputs.regex' instead."),
    _refused("guided_choice", BOTH, "vLLM", "Use 'structured_outputs.choice' instead."),
    _refused("guided_grammar", BOTH, "vLLM", "Use 'structured_outputs.grammar' instead."),
    _refused("guided_json_object", BOTH, "vLLM", "Use 'structured_outputs.json_object' instead."),
    _idle("guided_decoding_backend", BOTH, "vLLM", str),
    _refused("guided_whitespace_pattern", BOTH, "vLLM"),
    _refused("structural_tag", BOTH, "vLLM", _ONE_FORM),
    _refused("grammar_lazy", BOTH, "llama.cpp"),
    _refused("grammar_triggers", BOTH, "llama.cpp"),
    _refused("preserved_tokens", BOTH, "llama.cpp", "Use 'skip_special_tokens': false instead."),
)
_TOOLS = (
    _honoured(
        "tools",
        MESSAGES,
        "OpenAI",
        "Functions, and tools of the type 'custom' with grammars in 'regex' or 'lark'; up to 128.",
    ),
    _honoured("tool_choice", MESSAGES, "OpenAI", "'none', 'auto', 'required', or a function by its name."),
    _honoured("parallel_tool_calls", MESSAGES, "OpenAI", "false: one call at most.", off=(True,)),
    _honoured("reasoning_effort", MESSAGES, "OpenAI", "Where the model's template has a switch for it."),
    _honoured(
        "enable_thinking", MESSAGES, "SGLang", "Where the model's template has a switch for it.", empty_counts=True
    ),
    _honoured("include_reasoning", CHAT, "vLLM", "false: the answer is without its reasoning.", off=(True,)),
    _honoured("chat_template_kwargs", MESSAGES, "vLLM", "Variables that the model's template reads."),
    _refused("enable_thinking", COMPLETIONS, "SGLang", "Use /v1/chat/completions instead.", empty_counts=True),
    _refused("tools", COMPLETIONS, "OpenAI", "Use /v1/chat/completions instead."),
    _refused("tool_choice", COMPLETIONS, "OpenAI", "Use /v1/chat/completions instead.", off=("none", "auto")),
    _refused("functions", BOTH, "OpenAI", "Use 'tools' instead."),
    _refused("function_call", BOTH, "OpenAI", "Use 'tool_choice' instead.", off=("none", "auto")),
    _refused("reasoning", BOTH, "SGLang", "Use 'reasoning_effort' instead."),
    _refused("thinking", BOTH, "LiteLLM", "Use 'reasoning_effort' instead."),
    _honoured("thinking_token_budget", CHAT, "vLLM", "The most tokens of the reasoning.", off=(-1,)),
    _honoured("reasoning_budget", CHAT, "llama.cpp", "As 'thinking_token_budget'.", off=(-1,)),
    _refused("thinking_token_budget", COMPLETIONS, "vLLM", "Use /v1/chat/completions instead.", off=(-1,)),
    _refused("reasoning_budget", COMPLETIONS, "llama.cpp", "Use /v1/chat/completions instead.", off=(-1,)),
    _refused("reasoning_budget_tokens", BOTH, "llama.cpp", "Use 'thinking_token_budget' in chat.", off=(-1,)),
    _refused("reasoning_format", BOTH, "llama.cpp", off=("auto",)),
    _refused("reasoning_control", BOTH, "llama.cpp"),
    _refused("separate_reasoning", CHAT, "SGLang", off=(True,)),
    _idle("stream_reasoning", CHAT, "SGLang", bool, "Nothing of a stream is kept back."),
)
_NO_EFFECT = (
    _idle("store", BOTH, "OpenAI", bool, "Answers are not stored."),
    _idle(
        "user", ALL, "OpenAI", Name, "Names the end user for limits that the operator set, in at most 1,024 characters."
    ),
    _idle("safety_identifier", BOTH, "OpenAI", Name, "As 'user'."),
    _idle("prediction", BOTH, "OpenAI", dict[str, Any], "It could make the answer faster, never another one."),
    _idle("prompt_cache_retention", BOTH, "OpenAI", str, "The retention depends on tier and key."),
    _idle("prompt_cache_options", BOTH, "OpenAI", dict[str, Any], "The retention depends on tier and key."),
    _idle("stream_options.include_obfuscation", BOTH, "OpenAI", bool, "Nothing is added to hide lengths."),
    _idle("priority", BOTH, "vLLM", int, "Priority depends on tier and key."),
    _idle("request_id", BOTH, "vLLM", str, _BY_HEADER),
    _idle("rid", BOTH, "SGLang", Any, _BY_HEADER),
    _idle("session_id", BOTH, "vLLM", str, "Use 'prompt_cache_key' to name the conversation."),
    _idle("spaces_between_special_tokens", BOTH, "vLLM", bool, "Fast tokenizers never add such spaces."),
    _idle("stream_interval", BOTH, "vLLM", int, "Each step's text is an event."),
    _idle("return_mm_kwargs", BOTH, "vLLM", bool, _TEXT_ONLY),
    _idle("routed_dp_rank", BOTH, "SGLang", int, _ROUTED),
    _idle("data_parallel_rank", BOTH, "SGLang", int, _ROUTED),
    _idle("disagg_prefill_dp_rank", BOTH, "SGLang", int, _ROUTED),
    _idle("bootstrap_host", BOTH, "SGLang", Any, _ROUTED),
    _idle("bootstrap_port", BOTH, "SGLang", Any, _ROUTED),
    _idle("bootstrap_room", BOTH, "SGLang", Any, _ROUTED),
    _idle("custom_labels", BOTH, "SGLang", dict[str, str], "Metrics have no labels of a client's."),
    _idle("id_slot", BOTH, "llama.cpp", int, _ROUTED),
    _idle("cache_prompt", BOTH, "llama.cpp", bool, "Prompts are cached by the key's own settings."),
    _idle("n_cache_reuse", BOTH, "llama.cpp", int, "Prompts are cached by the key's own settings."),
    _idle("sse_ping_interval", BOTH, "llama.cpp", int, "A ping is sent after 12 to 15 s of silence."),
    _idle("backend_sampling", BOTH, "llama.cpp", bool),
    _idle("cache", BOTH, "LiteLLM", dict[str, Any], "No answer is served from a cache of answers."),
    _idle("tags", BOTH, "LiteLLM", list[str], "Use 'metadata' to mark requests."),
    _idle("num_retries", BOTH, "LiteLLM", int),
    _idle("litellm_session_id", BOTH, "LiteLLM", str),
    _idle("litellm_trace_id", BOTH, "LiteLLM", str),
    *(
        _idle(name, BOTH, "llama.cpp", Any, _ALWAYS_THERE)
        for name in (
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "xtc_threshold",
            "mirostat_tau",
            "mirostat_eta",
            "adaptive_decay",
        )
    ),
)
_REFUSED = (
    _refused("audio", BOTH, "OpenAI", _TEXT_ONLY),
    _refused("web_search_options", BOTH, "OpenAI", "Pass search results as messages.", empty_counts=True),
    _refused("moderation", BOTH, "OpenAI"),
    _refused("verbosity", BOTH, "OpenAI", "Ask for it in the messages.", off=("medium",)),
    _refused("suffix", BOTH, "OpenAI", "Write the model's own infilling format into the prompt."),
    _refused("messages", COMPLETIONS, "OpenAI", "Use /v1/chat/completions instead."),
    _refused("top_logprobs", COMPLETIONS, "OpenAI", _IN_LOGPROBS, off=(0,)),
    _refused("modalities", COMPLETIONS, "OpenAI", _TEXT_ONLY, off=(["text"],)),
    _refused("prompt", CHAT, "OpenAI", "Use 'messages', or /v1/completions."),
    _refused("chat_template", PROMPT, "vLLM", _OWN_TEMPLATE),
    _refused("chat_template_kwargs", COMPLETIONS, "vLLM", "Use /v1/chat/completions instead."),
    _refused("reasoning_effort", COMPLETIONS, "OpenAI", "Use /v1/chat/completions instead."),
    _refused("add_generation_prompt", COMPLETIONS, "vLLM", "Use /v1/chat/completions instead.", off=(True,)),
    _refused("continue_final_message", COMPLETIONS, "vLLM", "Use /v1/chat/completions instead."),
    _refused("documents", PROMPT, "vLLM", "Pass documents as messages."),
    _refused("media_io_kwargs", PROMPT, "vLLM", _TEXT_ONLY),
    _refused("mm_processor_kwargs", PROMPT, "vLLM", _TEXT_ONLY),
    _refused("logits_processors", BOTH, "vLLM", "Use 'logit_bias' instead."),
    _refused("watermarking", BOTH, "vLLM"),
    _refused("early_stopping", BOTH, "vLLM", "A beam search ends when its best beams do."),
    _refused("prompt_embeds", BOTH, "vLLM", "Use 'prompt' or 'messages' instead."),
    _refused("repetition_detection", BOTH, "vLLM", "Use 'repetition_penalty' instead."),
    _refused("return_token_offsets", BOTH, "vLLM", "Completions have 'text_offset' with 'logprobs'."),
    _refused("return_prompt_text", BOTH, "vLLM", "Use /tokenize and /detokenize instead."),
    _refused("routed_experts_prompt_start", BOTH, "vLLM", off=(0,)),
    _refused("kv_transfer_params", BOTH, "vLLM", _ROUTED),
    _refused("ec_transfer_params", BOTH, "vLLM", _ROUTED),
    _refused("vllm_xargs", BOTH, "vLLM"),
    _refused("return_hidden_states", BOTH, "SGLang"),
    _refused("return_routed_experts", BOTH, "SGLang"),
    _refused("routed_experts_start_len", BOTH, "SGLang", off=(0,)),
    _refused("return_cached_tokens_details", BOTH, "SGLang", _IN_USAGE),
    _refused("return_prompt_token_ids", BOTH, "SGLang", "Use 'return_token_ids' instead."),
    _refused("return_meta_info", BOTH, "SGLang", _IN_USAGE),
    _refused("task", BOTH, "SGLang"),
    _refused("stop_regex", BOTH, "SGLang", "Use 'stop' instead."),
    _refused("no_stop_trim", BOTH, "SGLang", "Use 'include_stop_str_in_output' instead."),
    _refused("lora_path", BOTH, "SGLang", _ADAPTER),
    _refused("session_params", BOTH, "SGLang", "Send the whole conversation; its beginning is cached."),
    _refused("custom_logit_processor", BOTH, "SGLang", "Use 'logit_bias' instead."),
    _refused("custom_params", BOTH, "SGLang"),
    _refused("input_ids", BOTH, "SGLang", "Send the ids as 'prompt' to /v1/completions."),
    _refused("extra_key", BOTH, "SGLang", "Use 'cache_salt' instead."),
    _refused("ngram_corpus_id", BOTH, "SGLang"),
    _refused("images_config", BOTH, "SGLang", _TEXT_ONLY),
    _refused("max_dynamic_patch", BOTH, "SGLang", _TEXT_ONLY),
    _refused("min_dynamic_patch", BOTH, "SGLang", _TEXT_ONLY),
    _refused("use_audio_in_video", BOTH, "SGLang", _TEXT_ONLY),
    _refused("n_predict", BOTH, "llama.cpp", "Use 'max_tokens' instead.", off=(-1,)),
    _refused("n_cmpl", BOTH, "llama.cpp", "Use 'n' instead.", off=(1,)),
    _refused("n_indent", BOTH, "llama.cpp", off=(0,)),
    _refused("n_keep", BOTH, "llama.cpp", "Use 'truncate_prompt_tokens' instead.", off=(0, -1)),
    _refused("n_discard", BOTH, "llama.cpp", "Use 'truncate_prompt_tokens' instead.", off=(0,)),
    _refused("n_probs", BOTH, "llama.cpp", _IN_LOGPROBS, off=(0,)),
    _refused("post_sampling_probs", BOTH, "llama.cpp", _IN_LOGPROBS),
    _refused("min_keep", BOTH, "llama.cpp", off=(0,)),
    _refused("t_max_predict_ms", BOTH, "llama.cpp", "Use 'max_tokens' instead.", off=(0, -1)),
    _refused("t_max_prompt_ms", BOTH, "llama.cpp", off=(0, -1)),
    _refused("dynatemp_range", BOTH, "llama.cpp", "Use 'temperature' instead.", off=(0,)),
    _refused("dynatemp_exponent", BOTH, "llama.cpp", "Use 'temperature' instead.", off=(1,)),
    _refused("typical_p", BOTH, "llama.cpp", "Use 'top_p' or 'min_p' instead.", off=(1,)),
    _refused("typ_p", BOTH, "llama.cpp", "Use 'top_p' or 'min_p' instead.", off=(1,)),
    _refused("top_n_sigma", BOTH, "llama.cpp", "Use 'min_p' instead.", off=(-1, 0)),
    _refused("repeat_penalty", BOTH, "llama.cpp", "Use 'repetition_penalty' instead.", off=(1,)),
    _refused("repeat_last_n", BOTH, "llama.cpp", "Penalties see the whole text.", off=(64, -1)),
    _refused("dry_multiplier", BOTH, "llama.cpp", "Use 'repetition_penalty' instead.", off=(0,)),
    _refused("xtc_probability", BOTH, "llama.cpp", off=(0,)),
    _refused("mirostat", BOTH, "llama.cpp", off=(0,)),
    _refused("adaptive_target", BOTH, "llama.cpp", off=(-1,)),
    _refused("samplers", BOTH, "llama.cpp", _NO_CHAIN),
    _refused("timings_per_token", BOTH, "llama.cpp", _IN_USAGE),
    _refused("return_progress", BOTH, "llama.cpp", _IN_USAGE),
    _refused("return_tokens", BOTH, "llama.cpp", "Use 'return_token_ids' instead."),
    _refused("response_fields", BOTH, "llama.cpp"),
    _refused("lora", BOTH, "llama.cpp", _ADAPTER),
    _refused("mock_response", BOTH, "LiteLLM"),
    _refused("fallbacks", BOTH, "LiteLLM", "Ask for another model in a request of its own."),
    _refused("context_window_fallback_dict", BOTH, "LiteLLM", "Ask for another model in a request of its own."),
    _refused("guardrails", BOTH, "LiteLLM"),
    _refused("prompt_id", BOTH, "LiteLLM", "Send the prompt itself."),
    _refused("prompt_variables", BOTH, "LiteLLM", "Send the prompt itself."),
    _refused("content", TOKENIZE, "llama.cpp", "Use 'prompt' instead."),
    _refused("add_special", TOKENIZE, "llama.cpp", "Use 'add_special_tokens' instead."),
    _refused("parse_special", TOKENIZE, "llama.cpp", "Control tokens in a client's text are text."),
    _refused("with_pieces", TOKENIZE, "llama.cpp", "'token_strs' has them."),
    _refused("content", ("detokenize",), "llama.cpp", "Use 'tokens' instead."),
)


def _without_effect_on_tokens(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Returns the parameters of chat that do not change its prompt: /tokenize takes a body of chat as it is."""
    return tuple(
        _idle(one.path, TOKENIZE, one.origin, Any, "It does not change the tokens of the prompt.")
        for one in parameters
        if "chat" in one.endpoints and "tokenize" not in one.endpoints and "." not in one.path and one.path != "prompt"
    )


_CHAT = (*_REQUEST, *_SAMPLING, *_LOGPROBS, *_FORMS, *_TOOLS, *_NO_EFFECT, *_REFUSED)
PARAMETERS: tuple[Parameter, ...] = (*_CHAT, *_without_effect_on_tokens(_CHAT))
