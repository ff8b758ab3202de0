"""Owns `engine chat`: a conversation in the terminal with a route of a running engine.

Knows the client and the terminal. /reset forgets the conversation, /system TEXT sets the system prompt, /exit ends;
Ctrl-C stops an answer, and at an empty prompt the chat.
"""

import sys
from dataclasses import dataclass, field

from ipc.client import Client, Options
from ipc.errors import EngineError
from ipc.messages import Delta, Finished, Message
from ipc.streams import raise_unless_finished

HELP = "/reset  forget the conversation    /system TEXT  set the system prompt    /exit  end"


@dataclass(slots=True)
class Chat:
    """One conversation. `options` go with every request."""

    client: Client
    route: str
    options: Options
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Read, answer, until the input ends."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"{self.route}: type a message; {HELP}")
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/exit":
                return
            self.take(line)

    def take(self, line: str) -> None:
        """One line of the user: a command, or a message to be answered."""
        if line == "/reset":
            self.turns.clear()
            print("(forgotten)")
        elif line.startswith("/system"):
            self.system = line.removeprefix("/system").strip()
            self.turns.clear()
            print("(system prompt set)" if self.system else "(system prompt removed)")
        elif line.startswith("/"):
            print(HELP)
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        asked = Message("user", line)
        system = [Message("system", self.system)] if self.system else []
        options: Options = {**self.options, "messages": [*system, *self.turns, asked]}
        text = ""
        try:
            with self.client.stream(self.route, "", **options) as stream:
                for event in stream:
                    if isinstance(event, Delta | Finished):
                        text += event.text
                        print(event.text, end="", flush=True)
                    else:
                        raise_unless_finished(event)
        except KeyboardInterrupt:
            print(" ...", end="")
        except EngineError as error:
            print(f"\n({error})")
            return
        print()
        self.turns += [asked, Message("assistant", text)]
