"""The interface as a page and as OpenAPI: routes of inference, which FastAPI does not see, beside those it serves."""

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from gateway.requests.paths import PATHS
from gateway.types import Dialect, Operation

_SUMMARIES: Final = {
    Operation.CHAT: "OpenAI's chat completions, whole and streamed",
    Operation.COMPLETIONS: "OpenAI's completions, whole and streamed",
    Operation.EMBEDDINGS: "OpenAI's embeddings, where an engine serves them",
    Operation.RERANK: "Documents by their relevance to a query, where an engine serves it",
    Operation.RESPONSES: "OpenAI's Responses, whole and streamed",
    Operation.MESSAGES: "Anthropic's Messages, whole and streamed",
    Operation.COUNT_TOKENS: "The number of tokens of a body of Messages",
    Operation.GENERATE: "LMDeploy's own route for prompts and token ids",
    Operation.TOKENIZE: "The token ids of a text or a chat",
    Operation.DETOKENIZE: "The text of token ids",
}
_MODELS: Final = {
    "/v1/models": "All models that instances serve",
    "/v1/models/{id}": "One model",
}
_API: Final = {Dialect.OPENAI: "OpenAI", Dialect.RESPONSES: "OpenAI", Dialect.ANTHROPIC: "Anthropic"}
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_CHAPTERS: Final = (("/v1", "Inference"), ("/admin/v1", "Administration"), ("", "Operation and others"))


def inference_paths() -> dict[str, dict[str, Any]]:
    """Return OpenAPI's path items of the inference routes. Bodies and answers are those of the API that each names."""
    posts = {
        path: {"post": _item(operation, _SUMMARIES[operation], api=_API[operation.dialect], has_body=True)}
        for operation, path in PATHS.items()
    }
    gets = {path: {"get": _item(summary, summary, api="OpenAI", has_body=False)} for path, summary in _MODELS.items()}
    gets["/v1/models/{id}"]["get"]["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return posts | gets


def docs_router() -> APIRouter:
    """Return the route of the page."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def page(request: Request) -> HTMLResponse:
        """All routes with one line each; the whole description is /openapi.json."""
        return HTMLResponse(_page(request.app.openapi()["paths"]), headers=_HEADERS)

    return router


def _item(name: str, summary: str, *, api: str, has_body: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "description": f"As in {api}'s API"}
    content = {"application/json": {"schema": schema}}
    body = {"requestBody": {"required": True, "content": content}} if has_body else {}
    return {
        "operationId": name.replace(" ", "_").lower(),
        "summary": summary,
        "tags": ["inference"],
        **body,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": f"An error in the envelope of {api}'s API", "content": content},
        },
    }


def _page(paths: Mapping[str, Mapping[str, Any]]) -> str:
    chapters: dict[str, list[str]] = {title: [] for _, title in _CHAPTERS}
    for path, item in sorted(paths.items()):
        title = next(title for beginning, title in _CHAPTERS if path.startswith(beginning))
        for method, each in item.items():
            line = each.get("description") or each.get("summary", "")
            chapters[title].append(
                f"<tr><td>{escape(method.upper())}</td><td><code>{escape(path)}</code></td>"
                f"<td>{escape(line.partition(chr(10))[0])}</td></tr>"
            )
    parts = [
        f"<h2>{title}</h2>\n<table>\n<tr><th>Method</th><th>Path</th><th>Purpose</th></tr>\n{chr(10).join(rows)}\n</table>"
        for title, rows in chapters.items()
        if rows
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>kvgate: routes</title>\n<h1>Routes of this '
        'gateway</h1>\n<p>Bodies and parameters: <a href="/openapi.json">/openapi.json</a>. Clients send their key as '
        "<code>Authorization: Bearer KEY</code>; their base URL ends with <code>/v1</code>.</p>\n"
        + "\n".join(parts)
        + "\n</html>\n"
    )
