"""Bodies of requests to a simulated engine: of LMDeploy's bodies the fields that matter to it."""

from engines.sim.bodies.anthropic import CountBody, Message, MessagesBody
from engines.sim.bodies.generate import GENERATE_TOKENS, GenerateBody
from engines.sim.bodies.openai import ChatBody, CompletionBody
from engines.sim.bodies.refusals import NotServedError
from engines.sim.bodies.responses import ResponsesBody

Body = ChatBody | CompletionBody | GenerateBody | MessagesBody | CountBody | ResponsesBody
Generated = ChatBody | CompletionBody | GenerateBody | MessagesBody | ResponsesBody
"""Bodies that are answered with text."""

__all__ = [
    "GENERATE_TOKENS",
    "Body",
    "ChatBody",
    "CompletionBody",
    "CountBody",
    "GenerateBody",
    "Generated",
    "Message",
    "MessagesBody",
    "NotServedError",
    "ResponsesBody",
]
