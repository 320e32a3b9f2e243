"""Refuses fields that engines are known to answer with misleading errors."""

from collections.abc import Iterable

from gateway.errors import InvalidRequestError
from gateway.registry import Instance
from gateway.requests.call import Call

_LMDEPLOY = "lmdeploy"


def refuse_unsupported(call: Call, instances: Iterable[Instance]) -> None:
    """Raise ``InvalidRequestError`` for a request that an instance of these would fail on.

    LMDeploy raises an exception within a streamed completion that asks for ``logprobs``.
    """
    if call.streams_logprobs and any(each.runs(_LMDEPLOY, call.model) for each in instances):
        raise InvalidRequestError(
            "logprobs: LMDeploy streams no logprobs of completions; ask without stream, or ask for a chat",
            param="logprobs",
            code="unsupported_parameter",
        )
