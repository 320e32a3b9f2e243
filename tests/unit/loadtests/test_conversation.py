"""What users say: exactly as long as the scenario has it, shared where it should be and nowhere else."""

import random

from kvcontrol.traces import OPENER, Words
from loadtests.conversation import Talk, Texts
from loadtests.scenario import Agent, Batch, Chat, Kind, Rag

WORDS = Words(words=tuple(f"w{number}" for number in range(40)), message_tokens=10)
TEXTS = Texts(WORDS, seed=3)


def talk(kind: Kind, user: int = 0, context_tokens: int = 0) -> Talk:
    return Talk(kind, TEXTS, random.Random(user), context_tokens=context_tokens)  # noqa: S311 - test data


def lengths(messages: list[dict[str, str]]) -> list[int]:
    return [len(each["content"].removeprefix(OPENER).split()) for each in messages]


def test_a_chat_grows_turn_by_turn_and_begins_anew_after_its_last() -> None:
    person = talk(Chat(system_tokens=30, first_tokens=20, turn_tokens=7, turns=3))
    asked = []
    for _ in range(4):
        messages = list(person.next_messages())
        asked.append(messages)
        person.answered("an answer", 100)
    assert [each["role"] for each in asked[2]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert asked[2][: len(asked[1])] == asked[1], "a later turn begins with the earlier ones"
    assert [lengths(messages)[-1] for messages in asked] == [20, 7, 7, 20]
    assert len(asked[3]) == 2
    assert asked[3][1] != asked[0][1]


def test_users_share_system_prompts_and_nothing_else() -> None:
    kind = Agent(system_tokens=50, system_prompts=2, task_tokens=20)
    opened = [talk(kind, user).next_messages() for user in range(20)]
    assert len({messages[0]["content"] for messages in opened}) == 2
    assert len({messages[1]["content"] for messages in opened}) == 20
    assert {tuple(lengths(messages)) for messages in opened} == {(50, 20)}


def test_kinds_dont_share_their_system_prompts_with_each_other() -> None:
    kinds: list[Kind] = [
        Chat(system_tokens=50),
        Agent(system_tokens=50),
        Rag(system_tokens=50),
        Batch(system_tokens=50),
    ]
    assert len({talk(kind).next_messages()[0]["content"] for kind in kinds}) == 4


def test_popular_documents_are_asked_for_more_often() -> None:
    asker = talk(Rag(documents=50, document_tokens=30, chosen=3, question_tokens=9, skew=1.2))
    seen: list[str] = []
    for _ in range(200):
        *documents, question = asker.next_messages()[1]["content"].split("\n\n")
        assert [len(each.removeprefix(OPENER).split()) for each in (*documents, question)] == [30, 30, 30, 9]
        seen += documents
        asker.answered("", 0)
    counts = sorted((seen.count(each) for each in set(seen)), reverse=True)
    assert len(counts) <= 50
    assert counts[0] > 5 * counts[-1]


def test_batch_work_is_never_the_same() -> None:
    worker = talk(Batch(prompt_tokens=40))
    said = set()
    for _ in range(10):
        said.add(worker.next_messages()[1]["content"])
        worker.answered("", 0)
    assert len(said) == 10


def test_a_conversation_ends_before_the_context_does() -> None:
    person = talk(
        Chat(system_tokens=30, first_tokens=20, turn_tokens=10, answer_tokens=10, turns=9), context_tokens=200
    )
    person.next_messages()
    person.answered("an answer", 100)
    assert len(person.next_messages()) == 4
    person.answered("an answer", 150)
    assert len(person.next_messages()) == 2


def test_a_failure_begins_a_new_conversation() -> None:
    person = talk(Chat())
    person.next_messages()
    person.answered("an answer", 100)
    person.next_messages()
    person.broken()
    assert len(person.next_messages()) == 2


def test_another_seed_makes_all_texts_others() -> None:
    assert Texts(WORDS, seed=4).shared(1, 100) != TEXTS.shared(1, 100)
    assert Texts(WORDS, seed=3).shared(1, 100) == TEXTS.shared(1, 100)
