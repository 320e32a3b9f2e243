import pickle

from engines.lmdeploy.admission import LogitBias


def test_a_logit_bias_reaches_another_process_and_adds_to_its_tokens_alone() -> None:
    bias = pickle.loads(pickle.dumps(LogitBias({1: 2.5, 3: -100.0})))  # noqa: S301 - our own
    assert bias([], [0.0, 1.0, 2.0, 3.0]) == [0.0, 3.5, 2.0, -97.0]
