"""The estimated cost of a request before it runs."""

from itertools import chain

from gateway.admission import AdmissionRequest
from gateway.fingerprint import ChatPrompt, Fingerprint, Gap, TokenPrompt, Unreadable
from gateway.fingerprint.canonical import TextPrompt
from gateway.placement.separation import RequestSize
from gateway.requests.call import Call
from gateway.types import Operation, RequestId, Tenant
from kvcontrol import tokenization

_ANSWERING = frozenset(
    {Operation.CHAT, Operation.COMPLETIONS, Operation.RESPONSES, Operation.MESSAGES, Operation.GENERATE}
)
_SEPARABLE = frozenset({Operation.CHAT, Operation.COMPLETIONS})
"""Their prompts may be computed by one instance and answered by another."""
_COUNTING = frozenset({Operation.COUNT_TOKENS, Operation.TOKENIZE, Operation.DETOKENIZE})
"""They cost a request and no tokens: nothing is computed from them."""
_BYTES_PER_TOKEN = 4
_MULTIMODAL_TOKENS = 4096
"""What a prompt's images and other opaque parts are taken for at most: their bytes say nothing about their tokens."""
_MOST_TOKENS = 1 << 40


def admission_of(
    tenant: Tenant, call: Call, fingerprint: Fingerprint | Gap, *, expected_output_tokens: int
) -> AdmissionRequest:
    """Return what is asked of admission; so many tokens are expected of an answer whose request doesn't bound it."""
    if call.operation in _COUNTING:
        prompt_tokens = 0
    elif isinstance(fingerprint, Fingerprint) and not isinstance(call.prompt, Unreadable):
        prompt_tokens = fingerprint.tokens
        if isinstance(call.prompt, ChatPrompt) and call.prompt.gap is not None:
            prompt_tokens += min(len(call.body) // _BYTES_PER_TOKEN, _MULTIMODAL_TOKENS)
    elif isinstance(call.prompt, Unreadable) and call.prompt.tokens is not None:
        prompt_tokens = call.prompt.tokens
    else:
        prompt_tokens = max(1, len(call.body) // _BYTES_PER_TOKEN)
    requested = max(0, call.answer_tokens or 0) * call.answers
    return AdmissionRequest(
        tenant=tenant,
        model=call.model,
        prompt_tokens=prompt_tokens,
        output_tokens=min(requested, _MOST_TOKENS),
        expected_output_tokens=expected_output_tokens * call.answers if call.operation in _ANSWERING else 0,
        prompts=call.prompts,
        answers=call.answers,
    )


def least_tokens(call: Call) -> int:
    """Return about how many tokens a prompt has at least, by the characters of its texts: nothing is tokenized."""
    match call.prompt:
        case TokenPrompt(token_ids=ids):
            return len(ids)
        case TextPrompt(text=text):
            return tokenization.least_tokens(len(text))
        case ChatPrompt(messages=messages):
            contents = (message.get("content") for message in messages)
            parts = chain.from_iterable(each if isinstance(each, list) else (each,) for each in contents)
            return tokenization.least_tokens(sum(len(text) for text in parts if isinstance(text, str)))
        case Unreadable(chars=chars):
            return tokenization.least_tokens(chars)


def admission_of_counting(tenant: Tenant) -> AdmissionRequest:
    """Return the same for what the gateway answers by its own tokenizer: a request, and no model's turn."""
    return AdmissionRequest(tenant=tenant, model="", prompt_tokens=0, output_tokens=0, expected_output_tokens=0)


def size_of(call: Call, ask: AdmissionRequest, request_id: RequestId) -> RequestSize:
    """Return what decides whether one instance computes its prompt for another."""
    return RequestSize(
        request_id=request_id,
        prompt_tokens=ask.prompt_tokens,
        max_tokens=ask.output_tokens or ask.expected_output_tokens,
        separable=call.operation in _SEPARABLE and call.answers == 1,
    )
