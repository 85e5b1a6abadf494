"""Checks of a gateway's message, whatever it contains. The module is pure, and knows the wire's types and the
vocabulary.

A decoder has checked types and nothing else: an integer has 64 bits, a float may be NaN, a string may have megabytes. A
worker trusts no gateway: each number, id, range and size is checked here, once, before anything computes with it. After
these checks they are what the engine and its kernels take. The checks cost C loops over the ids, and a table for the
rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from workers.protocol.messages import (
    AdapterCommand,
    BeamParams,
    CacheCommand,
    CacheProbe,
    CacheRange,
    Cancel,
    ExtendLease,
    GenerateRequest,
    Message,
    PoolingParams,
    Region,
    SamplingParams,
)

INT32 = 2**31 - 1
MAX_COUNT = 2**53
"""Largest count of tokens, milliseconds or messages. SQL and floats hold it exactly."""
MAX_NAME = 256
"""Largest number of characters of an id or a name, which is in each delta and in the journal."""
MAX_PATH = 4096
MAX_GRAMMAR = 1 << 20
MAX_REGIONS = 16
MAX_REGION_ID = 64
MAX_RANGES = 64
MAX_LOGPROBS = 1000
MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD = 1024
WEIGHTS = (1e-3, 1e6)
MAX_LENGTH_PENALTY = 10.0
MAX_INPUTS = 2048

Table = dict[str, bool]
"""Map from a possible fault to whether the message has it."""


def of_request(message: GenerateRequest, vocab_size: int) -> str:
    """Returns what is wrong with the request, or "" if nothing is."""
    tables = (_of_names, _of_numbers, _of_cache, _of_handed_over, _of_gathering)
    for table in tables:
        if fault := _first(table(message)):
            return fault
    if fault := _first(_of_ids(message, vocab_size)) or _first(_of_sampling(message.sampling)):
        return fault
    if message.pooling is not None and (fault := _first(_of_pooling(message, message.pooling, vocab_size))):
        return fault
    search = message.beams
    return "" if search is None else _first(_of_search(message, search))


def of_other(message: Message, vocab_size: int) -> str:
    """Returns what is wrong with a message that asks for no tokens, or "". Nobody waits for an ending of such a
    message, so the caller ignores one with a fault."""
    match message:
        case ExtendLease():
            return _first(
                {
                    "no name": not _is_name(message.request_id),
                    "a count out of range": not _are_counts(message.lease_seq, message.bound),
                }
            )
        case Cancel():
            return _first({"no name": not _is_name(message.request_id)})
        case CacheProbe():
            return _first(
                {
                    "an answer's number out of range": abs(message.peek_id) > MAX_COUNT,
                    "a name too long": max(len(message.root), len(message.adapter)) > MAX_NAME,
                    "regions that are none": not _are_regions(message.namespace),
                    "a token id outside of the vocabulary": _are_foreign(message.prompt, vocab_size),
                }
            )
        case CacheCommand():
            return _first(
                {
                    "an id or a name too long": len(message.region) > MAX_REGION_ID
                    or max(len(message.key), len(message.tenant)) > MAX_NAME,
                    "nothing to drop": message.action == "drop" and not message.tenant,
                }
            )
        case AdapterCommand():
            loads = message.action == "load"
            return _first(
                {
                    "no name": not _is_name(message.name),
                    "no path": not (_is_path(message.path) if loads else message.path == ""),
                }
            )
    return ""


def _first(table: Table) -> str:
    return next((fault for fault, present in table.items() if present), "")


# --- the parts of a request ---


def _of_gathering(message: GenerateRequest) -> Table:
    is_plain = message.num_choices == 1 and message.beams is None and message.pooling is None
    return {"tokens to gather of more than one plain choice": message.gather and not is_plain}


def _of_names(message: GenerateRequest) -> Table:
    return {
        "no id, or one too long": not _is_name(message.request_id),
        "no tenant, or one too long": not _is_name(message.tenant),
        "a name too long": max(len(message.model), len(message.adapter), len(message.traceparent)) > MAX_NAME,
        "a grammar too long": len(message.grammar) > MAX_GRAMMAR,
    }


def _of_numbers(message: GenerateRequest) -> Table:
    counts = (message.lease_bound, message.lease_seq, message.num_output_spent)
    least, most = WEIGHTS
    return {
        "no choice at all": message.num_choices < 1,
        "more choices than a number has room for": message.num_choices > INT32,
        "a bound below nothing, or out of range": not 0 <= message.max_tokens <= INT32,
        "a count below nothing, or out of range": not _are_counts(*counts),
        "a least length beyond the bound": message.sampling.min_tokens > message.max_tokens,
        "an attempt's number out of range": not 0 <= message.attempt <= INT32,
        "a weight out of range": not least <= message.weight <= most,
        "a number of prompt logprobs out of range": not -1 <= message.prompt_logprobs <= MAX_LOGPROBS,
    }


def _of_cache(message: GenerateRequest) -> Table:
    return {
        "regions that are none": not _are_regions(message.namespace),
        "a floor of blocks out of range": not 0 <= message.cache_floor_blocks <= INT32,
        "a quota of blocks out of range": abs(message.cache_quota_blocks) > INT32,
        "a worth outside of 0 to 100": not -1 <= message.output_priority <= 100,
        "too many ranges": len(message.retention) > MAX_RANGES,
        "a range that is none": not all(map(_is_range, message.retention[:MAX_RANGES])),
    }


def _of_handed_over(message: GenerateRequest) -> Table:
    indices = [index for index, _ in message.resume]
    return {
        "handed-over choices that do not exist": len(set(indices)) != len(indices)
        or any(not 0 <= index < message.num_choices for index in indices),
        "a handed-over choice that is over": any(
            len(output) >= max(1, message.max_tokens) for _, output in message.resume
        ),
    }


def _of_ids(message: GenerateRequest, vocab_size: int) -> Table:
    sampling = message.sampling
    biased = [token for token, _ in sampling.logit_bias]
    runs: list[Sequence[int]] = [message.prompt, *(output for _, output in message.resume)]
    runs += [*sampling.bad_words, sampling.allowed_token_ids, sampling.stop_token_ids, biased]
    runs.append(sampling.logprob_token_ids)
    return {
        "an empty prompt": not message.prompt,
        "a token id outside of the vocabulary": any(_are_foreign(run, vocab_size) for run in runs),
        "more tokens to draw from than there are": len(sampling.allowed_token_ids) > vocab_size,
        "a grammar together with bans": bool(message.grammar)
        and bool(sampling.bad_words or sampling.allowed_token_ids),
    }


def _of_sampling(sampling: SamplingParams) -> Table:
    words = sampling.bad_words
    return {
        "a seed that is not an unsigned 64-bit number": not 0 <= sampling.seed < 2**64,
        "a temperature out of range": not 0 <= sampling.temperature <= 100,
        "a part of the probability outside of 0 to 1": not (0 <= sampling.top_p <= 1 and 0 <= sampling.min_p <= 1),
        "a number of tokens to keep out of range": not 0 <= sampling.top_k <= INT32,
        "a penalty out of range": not (
            abs(sampling.presence_penalty) <= 100
            and abs(sampling.frequency_penalty) <= 100
            and 0.01 <= sampling.repetition_penalty <= 100
        ),
        "too many biases": len(sampling.logit_bias) > MAX_BIASES,
        "a bias out of range": not all(abs(value) <= 100 for _, value in sampling.logit_bias),
        "a number of logprobs out of range": not -1 <= sampling.logprobs <= MAX_LOGPROBS,
        "too many tokens to score": len(sampling.logprob_token_ids) > MAX_LOGPROBS,
        "too many tokens that end it": len(sampling.stop_token_ids) > MAX_STOP_TOKENS,
        "a least length out of range": not 0 <= sampling.min_tokens <= INT32,
        "too many bad words": len(words) > MAX_BAD_WORDS,
        "a bad word without tokens, or too long": not all(1 <= len(word) <= MAX_BAD_WORD for word in words),
    }


def _of_search(message: GenerateRequest, search: BeamParams) -> Table:
    """Returns the faults of a beam search. Beams have no tokens to hand over, and nothing but logprobs restricts
    them."""
    return {
        "a search that cannot be": bool(message.grammar or message.resume) or message.max_tokens == 0,
        "a length penalty out of range": not abs(search.length_penalty) <= MAX_LENGTH_PENALTY,
    }


def _of_pooling(message: GenerateRequest, pooling: PoolingParams, vocab_size: int) -> Table:
    """Returns the faults of a request for vectors. It may have nothing that shapes tokens."""
    lengths, segments, labels = pooling.lengths, pooling.segments, pooling.labels
    return {
        "tokens to draw together with vectors": message.max_tokens != 0 or message.num_choices != 1,
        "something together with vectors that only tokens have": bool(
            message.grammar or message.resume or message.beams
        )
        or message.prompt_logprobs >= 0
        or message.pinned,
        "a number of inputs out of range": not 1 <= len(lengths) <= MAX_INPUTS,
        "inputs that are not its prompt": min(lengths, default=0) < 1 or sum(lengths) != len(message.prompt),
        "a size of vectors out of range": not 0 <= pooling.dimensions <= INT32,
        "segments that are none": bool(segments)
        and (len(segments) != len(lengths) or any(not 0 <= s <= n for s, n in zip(segments, lengths, strict=False))),
        "labels that are none": len(labels) not in (0, 2) or _are_foreign(labels, vocab_size),
    }


# --- tests of numbers, names and ids; a NaN is in no range ---


def _are_counts(*numbers: int) -> bool:
    return all(0 <= number <= MAX_COUNT for number in numbers)


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME


def _is_path(text: str) -> bool:
    """Returns whether the path is absolute, so that nothing depends on the directory in which a worker was started."""
    return text.startswith("/") and len(text) <= MAX_PATH and "\0" not in text


def _are_foreign(ids: Sequence[int], vocab_size: int) -> bool:
    if not ids:
        return False
    if isinstance(ids, array) and ids.typecode == "i":
        # A prompt may have a million ids: as Python's numbers they would hold the engine's thread for 20 ms.
        least, most = torch.aminmax(torch.frombuffer(ids, dtype=torch.int32))
        return bool(least < 0 or most >= vocab_size)
    return min(ids) < 0 or max(ids) >= vocab_size


def _are_regions(namespace: Sequence[Region]) -> bool:
    return 1 <= len(namespace) <= MAX_REGIONS and all(
        1 <= len(one.id) <= MAX_REGION_ID and -1 <= one.end <= INT32 for one in namespace
    )


def _is_range(one: CacheRange) -> bool:
    return 0 <= one.priority <= 100 and 0 <= one.start <= INT32 and -1 <= one.end <= INT32 and 0 <= one.ttl_s <= INT32
