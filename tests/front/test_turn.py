"""A front that answers has served its mailbox and its timers; one whose timer died does not."""

import asyncio
from typing import NoReturn

import zmq

from engine.clock import MonotonicClock
from engine.config import Config, Deployment
from engine.front.main import FLUSH_S, Front
from ipc.channel import router
from ipc.control import AskStatus, StatusTold, Turn, Turned


def fail() -> NoReturn:
    raise RuntimeError("on purpose")


def test_a_front_whose_timer_died_has_no_turn():
    async def scenario() -> None:
        loop, told = asyncio.get_running_loop(), []
        faults: asyncio.Queue[str] = asyncio.Queue()
        loop.set_exception_handler(lambda _, what: faults.put_nowait(str(what["exception"])))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = router(context, 1000, 10), router(context, 1000, 10)
        answers: asyncio.Queue[object] = asyncio.Queue()
        config = Config([Deployment("sim", runner="sim")])
        front = Front(loop, config, sockets, MonotonicClock(), answers.put_nowait)
        try:
            front.start()
            async with asyncio.timeout(10):
                for number in (1, 2):
                    front.post(Turn(number))
                    told.append(await answers.get())
                front._desk.flush = fail
                assert await faults.get() == "on purpose"
                front.post(Turn(3))
                front.post(AskStatus(7))
                assert isinstance(await answers.get(), StatusTold)  # its mailbox is served still
                rang = asyncio.Event()
                loop.call_later(5 * FLUSH_S, rang.set)
                await rang.wait()
            assert answers.empty()
        finally:
            front._desk.flush = lambda: None
            front.stop()
            context.destroy(0)
        assert told == [Turned(1), Turned(2)]

    asyncio.run(scenario())
