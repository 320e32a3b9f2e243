"""Answers as an instance makes them: one to a prompt, several choices beside each other, several prompts in turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from engines.sim.dialects import Dialect, Served, WholeAnswer
from engines.sim.driver import Answer
from engines.sim.faults import InjectedFaultError
from engines.sim.instance import SimInstance
from engines.sim.metrics import SimMetrics
from engines.sim.sequence import SimRequest
from engines.sim.text import SimTokenizer


@dataclass(slots=True)
class Job:
    """One answer that is to be made."""

    served: Served
    request: SimRequest
    cached_tokens: int = 0
    """Known when it is made."""


class Answering:
    """Lets the engine make answers, and has them told."""

    def __init__(self, instance: SimInstance, tokenizer: SimTokenizer, metrics: SimMetrics) -> None:
        self._instance = instance
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def whole(self, jobs: Sequence[Job]) -> list[WholeAnswer]:
        """Return the answers, which are made beside each other."""
        if len(jobs) == 1:
            return [await self._collected(jobs[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._collected(job)) for job in jobs]
        return [task.result() for task in tasks]

    async def _collected(self, job: Job) -> WholeAnswer:
        served = job.served
        async with self._instance.driver.answering(job.request) as answer:
            async for _ in self._paced(answer):
                pass
            cached_tokens = answer.sequence.cached_tokens
        return WholeAnswer(served, self._tokenizer.decode(served.words) + served.last_text, cached_tokens)

    async def streamed(self, jobs: Sequence[Job], dialect: Dialect, *, together: bool) -> AsyncIterator[bytes]:
        """The events of all answers: mixed, as they come, or one answer after the other."""
        if together and len(jobs) > 1:
            async for events in self._mixed(jobs, dialect):
                yield events
        else:
            for job in jobs:
                async for events in self._stream_events(job, dialect):
                    yield events
        if events := dialect.over([WholeAnswer(job.served, "", job.cached_tokens) for job in jobs]):
            yield events

    async def _mixed(self, jobs: Sequence[Job], dialect: Dialect) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

        async def stream_events(job: Job) -> None:
            try:
                async for events in self._stream_events(job, dialect):
                    queue.put_nowait(events)
            except Exception as error:  # noqa: BLE001 - raised where the answer is told
                queue.put_nowait(error)
            else:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(stream_events(job)) for job in jobs]
        running = len(tasks)
        try:
            while running:
                match await queue.get():
                    case None:
                        running -= 1
                    case bytes(events):
                        yield events
                    case Exception() as error:
                        raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream_events(self, job: Job, dialect: Dialect) -> AsyncIterator[bytes]:
        """One answer's events."""
        instance, served = self._instance, job.served
        words, generated = served.words, job.request.output_tokens
        stream, faults = dialect.stream(served), instance.spec.faults
        dies_at = -1
        if faults.die and instance.rng.random() < faults.die:
            dies_at = instance.rng.randrange(generated)
        if begin := stream.begin():
            yield begin
        done = 0
        async with instance.driver.answering(job.request) as answer:
            async for count in self._paced(answer):
                tokens = words[done : done + count]
                done += count
                if 0 <= dies_at < done:
                    raise InjectedFaultError("the answer breaks off, as configured")
                if events := stream.more(self._tokenizer.decode(tokens), min(done, len(words)), tokens):
                    yield events
            job.cached_tokens = answer.sequence.cached_tokens
        yield stream.end()

    async def _paced(self, answer: Answer) -> AsyncIterator[int]:
        """The answer's tokens as they come, for the metrics too."""
        began_s = last_s = time.monotonic()
        first = True
        async for count in answer:
            now_s = time.monotonic()
            if first:
                self._metrics.first_token(now_s - began_s)
            else:
                self._metrics.gap(now_s - last_s)
            first, last_s = False, now_s
            yield count
