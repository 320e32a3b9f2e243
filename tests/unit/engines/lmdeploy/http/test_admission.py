import pickle
from typing import Any

import pytest
import torch
from fastapi import Depends, FastAPI, Request
from fastapi.responses import PlainTextResponse
from starlette.testclient import TestClient

from engines.lmdeploy.http.admission import LogitBias, filter_repetition_ngram, validate_json_request


def test_a_logit_bias_reaches_another_process_and_adds_to_its_tokens_alone() -> None:
    bias = pickle.loads(pickle.dumps(LogitBias({1: 2.5, 3: -100.0})))  # noqa: S301 - our own
    assert bias([], [0.0, 1.0, 2.0, 3.0]) == [0.0, 3.5, 2.0, -97.0]


def test_only_a_row_that_has_a_stop_token_ends_on_a_repetition() -> None:
    def ended(scores: Any, stop_words: Any) -> Any:
        assert bool((stop_words >= 0).all()), "used as indices"
        scores.fill_(-float("inf"))
        return scores.scatter_(1, stop_words[:, :1], 0.0)

    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    filtered = filter_repetition_ngram(ended)(scores, torch.tensor([[2, -1], [-1, -1]]))
    assert filtered.tolist() == [[-float("inf"), -float("inf"), 0.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 200), (b"{}", 200), (b"[]", 200), (b"{", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400)],
)
def test_a_route_without_fields_in_its_body_takes_none_and_what_is_no_json_is_a_400(body: bytes, status: int) -> None:
    from lmdeploy.serve.core.exceptions import RequestError
    from lmdeploy.serve.utils import server_utils

    app = FastAPI()

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: Exception) -> PlainTextResponse:
        assert isinstance(error, RequestError)
        return PlainTextResponse(error.message, error.status_code)

    @app.post("/sleep", dependencies=[Depends(validate_json_request(server_utils.validate_json_request))])
    async def sleep() -> None:
        pass

    with TestClient(app) as client:
        answer = client.post("/sleep", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert status == 200 or "is not JSON" in answer.text
