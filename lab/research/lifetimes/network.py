"""The learned estimators: an LSTM or a small transformer over a chat's earlier lifetimes, which learns as they end.

A lifetime is seen as a sequence: one step for each earlier lifetime of its chat (its logarithm), and a last one for
itself; each step also carries what is known of the whole (prompt, what is new, how many came before, how old it is).
From the last step's state come two logarithms, the median and how far above it nine of ten stay, trained with the
pinball loss of those quantiles. Every ``_EVERY`` lifetimes that ended, ``_STEPS`` steps of Adam are made on a batch of
which half are the newest and half were drawn from the last few thousand, each at a random age. Nothing is kept for
long: the network follows traffic that changes. Needs torch, which is imported when one is made.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from lab.research.lifetimes.lifetime import MOST_PAST, Estimate, LifetimeFeatures, check_lifetime

_WIDTH: Final = 32
_STEPS_LONG: Final = MOST_PAST + 1
_INPUTS: Final = 6
_KEPT: Final = 4_096
_BATCH: Final = 128
_EVERY: Final = 16
_STEPS: Final = 2
_LEARNING_RATE: Final = 2e-3
_LEAST: Final = 256
"""Lifetimes that must have ended before anything is said."""
_SCALE: Final = 8.0
"""Of logarithms of tokens or seconds, so that inputs are about 1."""


class NetworkKind(StrEnum):
    """Which network reads the sequence."""

    LSTM = "lstm"
    TRANSFORMER = "transformer"


class NetworkEstimator:
    """See the module's text; ``ImportError`` without torch. An estimate takes a good part of a millisecond."""

    def __init__(self, kind: NetworkKind, *, seed: int = 0) -> None:
        import torch

        self.name = kind.value
        self._torch = torch
        self._rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        # An engine's thread may compute without gradients: a network made or taught there needs them all the same.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(mode=False), torch.enable_grad():
            torch.manual_seed(seed)
            self._network = _network(torch, kind)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=_LEARNING_RATE)
        self._ended: deque[tuple[LifetimeFeatures, float]] = deque(maxlen=_KEPT)
        self._learnt = 0

    def estimate(self, features: LifetimeFeatures) -> Estimate | None:
        """See ``Estimator``."""
        if self._learnt < _LEAST:
            return None
        torch = self._torch
        with torch.inference_mode():
            inputs = torch.tensor([_steps(features, features.age)], dtype=torch.float32)
            middle, spread = self._network(inputs)[0].tolist()
        left = math.exp(_bounded(middle * _SCALE))
        return Estimate(
            left=left,
            left_p90=left * math.exp(_bounded(spread * _SCALE)),
            sureness=math.exp(-max(0.0, spread * _SCALE)),
        )

    def learn(self, features: LifetimeFeatures, lifetime: float) -> None:
        """See ``Estimator``; every so often this takes some milliseconds."""
        check_lifetime("lifetime", lifetime)
        self._ended.append((features, lifetime))
        self._learnt += 1
        if self._learnt % _EVERY == 0 and self._learnt >= _LEAST // 2:
            with self._torch.inference_mode(mode=False), self._torch.enable_grad():
                for _ in range(_STEPS):
                    self._step()

    def _step(self) -> None:
        torch, half = self._torch, _BATCH // 2
        newest = [self._ended[-place] for place in range(1, min(half, len(self._ended)) + 1)]
        drawn = self._rng.choices(self._ended, k=half)
        inputs, targets = [], []
        for features, lifetime in (*newest, *drawn):
            age = self._rng.random() * lifetime if self._rng.random() < 1 / 4 else 0.0
            inputs.append(_steps(features, age))
            targets.append(math.log(max(1e-3, lifetime - age)) / _SCALE)
        said = self._network(torch.tensor(inputs, dtype=torch.float32))
        wanted = torch.tensor(targets, dtype=torch.float32)
        middle = said[:, 0]
        over = wanted - middle.detach() - said[:, 1]
        loss = (wanted - middle).abs().mean() / 2 + torch.maximum(0.9 * over, -0.1 * over).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()


def _steps(features: LifetimeFeatures, age: float) -> list[list[float]]:
    """Return the sequence, padded in front."""
    past = features.past[-MOST_PAST:]
    new = features.new_tokens
    whole = [
        _log(features.prompt_tokens),
        -1.0 if new is None else _log(new),
        len(past) / MOST_PAST,
        _log(age),
    ]
    padding = MOST_PAST - len(past)
    return [
        *([[0.0, 0.0, *whole]] * padding),
        *([_log(each), 1.0, *whole] for each in past),
        [0.0, -1.0, *whole],
    ]


def _log(value: float) -> float:
    return math.log1p(max(0.0, value)) / _SCALE


def _bounded(logarithm: float) -> float:
    return max(-20.0, min(20.0, logarithm))


def _network(torch: Any, kind: NetworkKind) -> Any:
    """Return a module from (batch, steps, inputs) to (batch, 2)."""
    nn = torch.nn

    class Network(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(_WIDTH + _INPUTS, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 2))
            if kind is NetworkKind.LSTM:
                self.body = nn.LSTM(_INPUTS, _WIDTH, batch_first=True)
            else:
                self.enter = nn.Linear(_INPUTS, _WIDTH)
                self.places = nn.Parameter(torch.randn(_STEPS_LONG, _WIDTH) * 0.02)
                self.query = nn.Linear(_WIDTH, _WIDTH)
                self.key = nn.Linear(_WIDTH, _WIDTH)
                self.value = nn.Linear(_WIDTH, _WIDTH)
                self.feed = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.ReLU(), nn.Linear(2 * _WIDTH, _WIDTH))
                self.norm = nn.LayerNorm(_WIDTH)

        def forward(self, inputs: Any) -> Any:
            state = self._last(inputs)
            said = self.head(torch.cat([state, inputs[:, -1]], dim=-1))
            return torch.stack([said[:, 0], nn.functional.softplus(said[:, 1]) / 4], dim=-1)

        def _last(self, inputs: Any) -> Any:
            if kind is NetworkKind.LSTM:
                return self.body(inputs)[0][:, -1]
            states = self.enter(inputs) + self.places
            # only the last step's state is read, so only its attention is worked out: one row, two heads
            batch = states.shape[0]
            asked = self.query(states[:, -1:]).view(batch, 1, 2, -1).transpose(1, 2)
            keys, values = (
                each(states).view(batch, _STEPS_LONG, 2, -1).transpose(1, 2) for each in (self.key, self.value)
            )
            seen = nn.functional.scaled_dot_product_attention(asked, keys, values).reshape(batch, _WIDTH)
            state = states[:, -1] + seen
            return self.norm(state + self.feed(state))

    return Network()


def estimators(kinds: Sequence[NetworkKind] = tuple(NetworkKind)) -> list[NetworkEstimator]:
    """Return one of each kind."""
    return [NetworkEstimator(kind) for kind in kinds]
