"""A mailbox: in order, bounded, typed; timers that end with the actor."""

import asyncio
from dataclasses import dataclass

import pytest

from ipc import actor
from ipc.actor import Actor, MailboxFull


@dataclass
class Note:
    number: int


@dataclass
class Other:
    pass


def test_messages_come_in_order_and_only_known_types():
    async def scenario() -> list[int]:
        made, seen = Actor(asyncio.get_running_loop()), []
        made.handle(Note, lambda note: seen.append(note.number))
        for number in range(5):
            made.post(Note(number))
        with pytest.raises(KeyError, match="Other"):
            made.post(Other())
        assert seen == []  # never inside post
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(scenario()) == list(range(5))


def test_a_handler_that_posts_does_not_starve_the_loop():
    async def scenario() -> int:
        made, seen = Actor(asyncio.get_running_loop()), []

        def again(note: Note) -> None:
            seen.append(note.number)
            made.post(Note(note.number + 1))

        made.handle(Note, again)
        made.post(Note(0))
        for _ in range(10):
            await asyncio.sleep(0)
        made.stop_serving()
        return len(seen)

    assert 5 <= asyncio.run(scenario()) <= 10


def test_the_mailbox_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actor, "MAILBOX_MAX", 3)

    async def scenario() -> None:
        made = Actor(asyncio.get_running_loop())
        made.handle(Note, lambda _: None)
        for number in range(3):
            made.post(Note(number))
        with pytest.raises(MailboxFull):
            made.post(Note(4))
        await asyncio.sleep(0)
        made.post(Note(5))

    asyncio.run(scenario())


def test_a_timer_that_raises_rings_again():
    """One fault in a flush, and nothing was flushed ever after."""

    async def scenario() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        made, told, seen, rang = Actor(loop), [], [], asyncio.Event()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

        def fail() -> None:
            seen.append("again")
            if len(seen) >= 3:
                rang.set()
            raise ValueError("broken")

        made.every(0.001, fail)
        async with asyncio.timeout(5):
            await rang.wait()
        made.stop_serving()
        await asyncio.sleep(0)
        return len(seen), len(told)

    num_seen, num_told = asyncio.run(scenario())
    assert num_seen >= 3
    assert num_told >= 2


def test_timers_end_with_the_actor():
    async def scenario() -> list[str]:
        made, seen = Actor(asyncio.get_running_loop()), []
        rang = asyncio.Event()
        made.after(0.0, lambda: seen.append("once"))
        made.cancel(made.after(0.0, lambda: seen.append("never")))
        made.every(0.001, lambda: (seen.append("often"), rang.set() if len(seen) > 4 else None))
        async with asyncio.timeout(5):
            await rang.wait()
        made.after(0.0, lambda: seen.append("late"))
        made.stop_serving()
        count = len(seen)
        await asyncio.sleep(0.02)
        assert len(seen) == count
        return seen

    seen = asyncio.run(scenario())
    assert seen.count("once") == 1
    assert not {"never", "late"} & set(seen)
