"""The users as locust knows them: each takes its part of the scenario, asks, waits for its answer, and thinks."""

import itertools
import random
from dataclasses import dataclass, field
from typing import ClassVar

from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from kvcontrol.traces.synthesis import Words
from loadtests.conversation import Talk, Texts
from loadtests.exchange import Client, Reply
from loadtests.scenario import Scenario
from loadtests.tally import count

_AGAIN_S = 1.0
"""The least pause after a failure: a gateway that refuses at once isn't asked thousands of times a second."""


class RequestFailed(Exception):  # noqa: N818 - locust shows the name beside the message
    """What locust's table of failures shows of a request that got no whole answer."""


class RequestShed(RequestFailed):
    """The gateway refused the request: 429 or 503."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """What all users of a process share: the scenario, and whom they ask. ``seed`` makes their texts others."""

    scenario: Scenario
    url: str
    model: str
    api_key: str | None
    timeout_s: float
    words: Words
    seed: int
    process: int = 0
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.texts = Texts(self.words, seed=self.seed)

    texts: Texts = field(init=False)

    def rng(self) -> random.Random:
        """Return the next user's own randomness, the same for the same seed and order."""
        return random.Random(f"{self.seed}/{self.process}/{next(self._numbers)}")  # noqa: S311 - no secret


STAGES: dict[Environment, Stage] = {}
"""By environment: locust gives users nothing else of ours. The locustfile puts the only one in."""


class Person(User):
    """One user of a scenario."""

    abstract = True
    kind_name: ClassVar[str]

    def on_start(self) -> None:
        stage = STAGES.get(self.environment)
        if stage is None:
            raise StopUser  # the target can't be tested: the run is being stopped
        self.stage = stage
        self.rng = stage.rng()
        self.kind = stage.scenario.kinds[self.kind_name]
        self.client = Client(stage.url, api_key=stage.api_key, timeout_s=stage.timeout_s)
        self.talk = Talk(self.kind, stage.texts, self.rng, context_tokens=stage.words.context_tokens or 0)
        self.pause_s = 0.0

    def on_stop(self) -> None:
        if self.environment in STAGES:
            self.client.close()

    def wait_time(self) -> float:
        """Seconds of thought: the scenario's in the mean, half as long at least."""
        return max(self.kind.think_s * self.rng.uniform(0.5, 1.5), self.pause_s)

    @task
    def ask(self) -> None:
        """Ask once."""
        reply = self.client.chat(self.stage.model, self.talk.next_messages(), self.kind.answer_tokens)
        if reply.error:
            self.talk.broken()
            self.pause_s = _AGAIN_S
        else:
            self.talk.answered(reply.text, reply.prompt_tokens + reply.completion_tokens)
            self.pause_s = 0.0
        self._tell(reply)

    def _tell(self, reply: Reply) -> None:
        failure = (RequestShed if reply.shed else RequestFailed)(reply.error) if reply.error else None
        self.environment.events.request.fire(
            request_type="POST",
            name=self.kind_name,
            response_time=reply.total_ms,
            response_length=reply.size_bytes,
            exception=failure,
            context={},
        )
        if failure is None:
            count(self.environment.stats, self.kind_name, reply)


class ChatUser(Person):
    """A person who talks."""

    kind_name = "chat"


class AgentUser(Person):
    """A program in a loop."""

    kind_name = "agent"


class RagUser(Person):
    """Somebody who asks about documents."""

    kind_name = "rag"


class BatchUser(Person):
    """Work that nobody waits for."""

    kind_name = "batch"


ALL: tuple[type[Person], ...] = (ChatUser, AgentUser, RagUser, BatchUser)
