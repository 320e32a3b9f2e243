"""Bodies of requests to a simulated engine: of LMDeploy's bodies the fields that matter to it."""

from engines.sim.bodies.anthropic import CountBody, MessagesBody
from engines.sim.bodies.generate import GenerateBody
from engines.sim.bodies.openai import ChatBody, CompletionBody
from engines.sim.bodies.refusals import NotServedError
from engines.sim.bodies.responses import ResponsesBody

Body = ChatBody | CompletionBody | GenerateBody | MessagesBody | CountBody | ResponsesBody
Generated = ChatBody | CompletionBody | GenerateBody | MessagesBody | ResponsesBody
"""Bodies that are answered with text."""

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "CountBody",
    "GenerateBody",
    "Generated",
    "MessagesBody",
    "NotServedError",
    "ResponsesBody",
]
