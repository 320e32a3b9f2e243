import pickle
from typing import Any

import torch

from engines.lmdeploy.http.admission import LogitBias, filter_repetition_ngram


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
