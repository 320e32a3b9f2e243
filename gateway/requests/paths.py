"""The path of each operation of the inference APIs, at the gateway and at an engine."""

from typing import Final

from gateway.types import Operation

PATHS: Final = {
    Operation.CHAT: "/v1/chat/completions",
    Operation.COMPLETIONS: "/v1/completions",
    Operation.EMBEDDINGS: "/v1/embeddings",
    Operation.RERANK: "/v1/rerank",
    Operation.RESPONSES: "/v1/responses",
    Operation.MESSAGES: "/v1/messages",
    Operation.COUNT_TOKENS: "/v1/messages/count_tokens",
    Operation.GENERATE: "/generate",
    Operation.TOKENIZE: "/tokenize",
    Operation.DETOKENIZE: "/detokenize",
}
PATH_BYTES: Final = {operation: path.encode() for operation, path in PATHS.items()}
