import random
from collections import OrderedDict

from gateway.routing import LearnedAffinity
from gateway.routing.learned import _GROWTH, _LEAST_BLOCKS, BLOCK_TOKENS
from kvcontrol.core import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex

A, B = InstanceId("a"), InstanceId("b")


def chain(name: str, blocks: int) -> list[BlockHash]:
    return [BlockHash(f"{name}{number}".encode().ljust(16, b".")) for number in range(blocks)]


class Learner:
    def __init__(self, capacity_blocks: int = 1000) -> None:
        self.index = FleetIndex()
        self.learned = LearnedAffinity(self.index, capacity_tokens=capacity_blocks * BLOCK_TOKENS)

    def matched(self, hashes: list[BlockHash], instance: InstanceId = A) -> int:
        match = self.index.match(hashes).get(instance)
        return 0 if match is None else match.blocks

    def ask(self, hashes: list[BlockHash], held: int | None = None, instance: InstanceId = A) -> int:
        """One request: what is expected, then what the answer says (nothing, or ``held`` blocks)."""
        guess = self.learned.guess(instance, hashes, self.matched(hashes, instance))
        self.learned.computed(guess)
        missing = 0 if held is None else self.learned.answered(guess, held=held)
        self.index.check_integrity()
        return missing


def test_what_was_computed_somewhere_is_expected_there_and_only_there() -> None:
    learner = Learner()
    learner.ask(chain("x", 5))
    assert learner.matched(chain("x", 5)) == 5
    assert learner.matched(chain("x", 5), B) == 0
    assert learner.matched([*chain("x", 3), *chain("y", 2)]) == 3


def test_beyond_the_capacity_the_oldest_go_first_tails_before_heads() -> None:
    learner = Learner(capacity_blocks=10)
    learner.ask(chain("x", 6))
    learner.ask(chain("y", 6))
    assert learner.learned.held(A) == 10
    assert (learner.matched(chain("x", 6)), learner.matched(chain("y", 6))) == (4, 6)
    learner.ask(chain("z", 30))
    assert learner.matched(chain("z", 30)) == 30


def test_a_false_hit_forgets_what_was_not_used_since_and_shrinks_what_is_believed_to_fit() -> None:
    learner = Learner()
    for name in "abcdefgh":
        learner.ask(chain(name, 10), held=0)
    assert learner.learned.held(A) == 80
    assert learner.ask(chain("d", 10), held=0) == 10
    assert [learner.matched(chain(name, 10)) for name in "abcdefgh"] == [0, 0, 0, 10, 0, 10, 10, 10]
    learner.ask(chain("i", 10), held=0)
    assert learner.learned.held(A) == 40


def test_true_hits_let_the_capacity_grow_again() -> None:
    learner = Learner()
    for name in "abc":
        learner.ask(chain(name, 10), held=0)
    learner.ask(chain("a", 10), held=0)
    assert learner.learned.held(A) == 20
    for _ in range(40):
        assert learner.ask(chain("a", 10), held=10) == 0
    for name in "defg":
        learner.ask(chain(name, 10))
    assert learner.learned.held(A) > 50


def test_one_block_less_is_rounding() -> None:
    learner = Learner()
    learner.ask(chain("a", 10))
    assert learner.ask(chain("a", 10), held=9) == 0
    assert learner.matched(chain("a", 10)) == 10


def test_an_instance_that_is_gone_or_new_is_forgotten() -> None:
    learner = Learner()
    learner.ask(chain("a", 10))
    learner.learned.forget(A)
    learner.learned.forget(B)
    assert learner.matched(chain("a", 10)) == 0
    assert learner.learned.held(A) == 0


def test_after_an_engine_lost_all_once_its_conversations_are_believed_again_within_a_few_turns() -> None:
    learner, cache = Learner(capacity_blocks=5000), SmallCache(5000)

    def turns(number: int) -> list[float]:
        found: list[float] = []
        for each in range(30):
            hashes = chain(f"c{each}-", 16 + number)
            expected = learner.matched(hashes)
            held = cache.serve(hashes)
            learner.ask(hashes, held=held)
            found.append(expected / held if held else float(not expected))
        return found

    for number in range(4):
        turns(number)
    cache.blocks.clear()
    turns(4)
    turns(5)
    assert sum(turns(6)) / 30 > 0.9


class SmallCache:
    """An engine's prefix cache: so many blocks, the least recently used go first."""

    def __init__(self, blocks: int) -> None:
        self.blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self.capacity = blocks

    def serve(self, hashes: list[BlockHash]) -> int:
        held = next((number for number, each in enumerate(hashes) if each not in self.blocks), len(hashes))
        for each in reversed(hashes):
            self.blocks[each] = None
            self.blocks.move_to_end(each)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return held


def test_the_size_of_an_unknown_cache_is_found_out_and_guesses_become_right() -> None:
    learner, cache = Learner(capacity_blocks=10_000), SmallCache(120)
    chance = random.Random(3)  # noqa: S311 - a load, no secret
    errors = []
    for _ in range(1500):
        hashes = chain(f"s{min(int(chance.expovariate(0.1)), 60)}-", 8)
        expected = learner.matched(hashes)
        held = cache.serve(hashes)
        learner.ask(hashes, held=held)
        errors.append(abs(expected - held) / 8)
    assert sum(errors[-500:]) / 500 < 0.1
    assert 60 < learner.learned.held(A) < 240


class NaiveLearner:
    """The same of one instance, with each block a link of one list that is in the order of use."""

    def __init__(self, capacity_blocks: int) -> None:
        self.blocks: OrderedDict[BlockHash, int] = OrderedDict()
        self.most = self.capacity = capacity_blocks
        self.turn = 0

    def ask(self, hashes: list[BlockHash], matched: int, held: int | None) -> int:
        ages = [self.blocks.get(each, 0) for each in hashes[:matched]]
        self.turn += 1
        for each in reversed(hashes):
            self.blocks[each] = self.turn
            self.blocks.move_to_end(each)
        self._trim(max(self.capacity, len(hashes)))
        if held is None or matched - held <= 1:
            if held is not None and (ages or held):
                found = max(0, held - matched)
                self.capacity = min(self.most, self.capacity + found + 1 + self.capacity // _GROWTH)
            return 0
        self.blocks = OrderedDict((each, used) for each, used in self.blocks.items() if used > ages[held])
        self.capacity = max(_LEAST_BLOCKS, len(hashes), len(self.blocks) - (matched - held))
        self._trim(self.capacity)
        return matched - held

    def _trim(self, blocks: int) -> None:
        while len(self.blocks) > blocks:
            self.blocks.popitem(last=False)


def test_it_believes_what_a_list_in_the_order_of_use_would() -> None:
    for seed in range(6):
        chance = random.Random(seed)  # noqa: S311 - a load, no secret
        capacity = chance.choice([10, 60, 300, 5000])
        learner, naive = Learner(capacity), NaiveLearner(capacity)
        for number in range(500):
            begun = chain(f"s{chance.randrange(4)}-", 30)[: chance.randrange(31)]
            hashes = begun + chain(f"c{chance.randrange(40)}-", chance.choice([1, 5, 20, 60]))
            matched = learner.matched(hashes)
            held = chance.choice([None, matched, max(0, matched - chance.randrange(8)), len(hashes)])
            assert learner.ask(hashes, held) == naive.ask(hashes, matched, held)
            if not number % 25:
                assert learner.learned.held(A) == len(naive.blocks)
                assert set(learner.learned._memories[A].blocks) == set(naive.blocks)
        assert len(learner.learned._memories[A]._uses) < 2000
