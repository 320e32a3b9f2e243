"""What a simulated engine does at one time, beside spans of decode steps."""

from dataclasses import dataclass

from engines.sim.sequence import SimSequence


@dataclass(slots=True)
class Prefill:
    """A step that computes so many tokens of these prompts."""

    end_s: float
    seconds: float
    chunks: list[tuple[SimSequence, int]]

    @property
    def is_chunk(self) -> bool:
        """Whether something of its prompts is left, before its tokens are counted."""
        return any(sequence.computed + tokens < sequence.target for sequence, tokens in self.chunks)

    def leave_out(self, sequence: SimSequence) -> None:
        """Nobody wants a prompt any more: its chunk is computed all the same, for nobody."""
        self.chunks = [each for each in self.chunks if each[0] is not sequence]


@dataclass(slots=True)
class Wait:
    """Nothing to compute before a load, a request or a chunk beside is over."""

    end_s: float
