"""Owns the client side of the front: the client socket, the sessions on it, and what waits to be sent to them.

Knows no route, no worker and no request beyond its number: what a frame asks for is handed up, who went away is handed
up. Called by the front actor.
"""

from collections.abc import Callable

from engine.clock import Clock
from engine.config import Front as FrontConfig
from engine.front.outbox import Outbox
from engine.front.sessions import Session, SessionStatistics, SessionTable
from engine.keys import Key
from ipc import codec
from ipc.channel import Channel, Sent
from ipc.errors import Code, ProtocolError
from ipc.messages import MAJOR, MINOR, Empty, Error, Event, Head, Hello, Kind, Welcome

# Routing ids that libzmq made up begin with a zero byte, and no peer can choose one that does. A chosen id is refused:
# a second peer that chooses the same is ignored by libzmq without a word, for good.
ASSIGNED_ID_START = 0

Frames = list[bytes]


class Desk:
    """Sessions on the client socket. `on_gone(session, code)` is called once for each session that ends."""

    def __init__(
        self, channel: Channel, config: FrontConfig, clock: Clock, on_gone: Callable[[Session, Code], None]
    ) -> None:
        self._doors = [channel]
        self._keys: list[dict[str, Key] | None] = [None]
        self._clock = clock
        self._on_gone = on_gone
        self.config = config
        self.sessions = SessionTable()
        self._looked_at = clock.now()
        self.num_protocol_errors = 0
        self.num_slow_readers = 0
        self.num_lost_peers = 0

    def open_door(self, channel: Channel, keys: dict[str, Key]) -> int:
        """A second socket, whose peers have shown a public key; `keys` by those. Returns its number."""
        self._doors.append(channel)
        self._keys.append(keys)
        return len(self._doors) - 1

    def admit(self, frames: Frames, door: int = 0) -> tuple[Session, Kind, Frames] | None:
        """What a peer said, if it has a session; HELLO, PING and BYE are dealt with here.

        Raises ProtocolError for what breaks the specification; strangers get `no_session`.
        """
        identity = frames[0]
        session = self.sessions.of_identity(identity, door)
        message = frames[1:]
        kind = codec.kind_of(message)
        if kind is Kind.HELLO:
            self._hello(identity, session, message, door)
            return None
        if session is None:
            told = Error(Code.NO_SESSION.value, "say HELLO first; this front does not know you")
            self._reply(identity, told, door)
            return None
        session.heard_at = self._clock.now()
        if kind is Kind.PING:
            self.send(session, codec.message(Kind.PONG, None, Empty()))
            return None
        if kind is Kind.BYE:
            self.end(session, Code.CANCELLED)
            return None
        return session, kind, message

    def _hello(self, identity: bytes, session: Session | None, message: Frames, door: int) -> None:
        if identity[0] != ASSIGNED_ID_START:
            raise ProtocolError("a peer must not choose its routing id", Code.DENIED)
        if len(message) < 3:
            raise ProtocolError("the body frame is missing")
        hello = codec.decode(message[2], Hello)
        if hello.major != MAJOR:
            raise ProtocolError(f"major version {hello.major} is not spoken here", Code.UNSUPPORTED, "major")
        if session is None:
            if len(self.sessions) >= self.config.sessions_max:
                error = Error(Code.OVERLOADED.value, f"{self.config.sessions_max} sessions are open", retry_after_s=1.0)
                self._reply(identity, error, door)
                return
            keys = self._keys[door]
            key = keys.get(self._doors[door].user) if keys is not None else None
            if keys is not None and key is None:
                raise ProtocolError("this public key is not known here", Code.DENIED)
            outbox = Outbox(self.config.outbox_messages_max, self.config.outbox_bytes_max)
            session = self.sessions.open(identity, hello.client, outbox, self._clock.now(), door, key)
        config = self.config
        welcome = Welcome(
            MAJOR,
            MINOR,
            session.number,
            config.heartbeat_s,
            config.heartbeat_misses,
            config.body_bytes_max,
            config.session_requests_max,
        )
        self.send(session, codec.message(Kind.WELCOME, None, welcome))

    def refuse(self, identity: bytes, error: ProtocolError, door: int = 0) -> None:
        """Tell a peer what it did wrong. Frames that are not of this protocol end its session as well."""
        self.num_protocol_errors += 1
        self._reply(identity, Error(error.code.value, error.message, error.field), door)
        session = self.sessions.of_identity(identity, door)
        if session is not None and error.code is Code.PROTOCOL:
            self.end(session, Code.PROTOCOL)

    def _reply(self, identity: bytes, error: Error, door: int) -> None:
        """Best effort: a stranger has no outbox."""
        self._doors[door].send_nowait([identity, *codec.message(Kind.ERROR, Head(error.request), error)])

    def tell(self, session: Session, event: Event) -> None:
        """One event of the front's own making."""
        self.send(session, codec.events([event]))

    def error(self, session: Session, error: Error) -> None:
        """A refusal that ends no request."""
        self.send(session, codec.message(Kind.ERROR, Head(error.request), error))

    def send(self, session: Session, message: Frames) -> None:
        """Send, or keep in the session's outbox while it does not read; over the bound the session ends."""
        if self.sessions.of_number(session.number) is not session:
            return  # it has ended
        outbox = session.outbox
        if not len(outbox):
            sent = self._doors[session.door].send_nowait([session.identity, *message])
            if sent is Sent.YES:
                return
            if sent is Sent.GONE:
                self._lose(session)
                return
        if outbox.push(message):
            self.sessions.clogged.add(session)
        else:
            self.num_slow_readers += 1
            self.end(session, Code.SLOW_READER)

    def _lose(self, session: Session) -> None:
        if self.sessions.of_number(session.number) is session:
            self.num_lost_peers += 1
            self.end(session, Code.CANCELLED)

    def flush(self) -> None:
        """Try again what could not be sent. Called by a timer while anything is clogged."""
        for session in list(self.sessions.clogged):
            gone = False

            def send(message: Frames, session: Session = session) -> bool:
                nonlocal gone
                sent = self._doors[session.door].send_nowait([session.identity, *message])
                gone = gone or sent is Sent.GONE
                return sent is Sent.YES

            session.outbox.drain(send)
            if gone:
                self._lose(session)
            elif not len(session.outbox):
                self.sessions.clogged.discard(session)

    def end_silent(self) -> None:
        """End the sessions whose heartbeats stopped: their clients are gone.

        Called twice per heartbeat. If this process itself stood still, what they said meanwhile is still unread: the
        time lost is not counted against them.
        """
        now, heartbeat_s = self._clock.now(), self.config.heartbeat_s
        lateness_s = max(0.0, now - self._looked_at - heartbeat_s)
        self._looked_at = now
        for session in self.sessions.silent(now, heartbeat_s * self.config.heartbeat_misses + lateness_s):
            self._lose(session)

    def end(self, session: Session, code: Code) -> None:
        """Forget the session; its requests are handed up to be cancelled. Safe to call twice."""
        if self.sessions.of_number(session.number) is not session:
            return
        self.sessions.close(session)
        if code is Code.SLOW_READER:
            self._reply(session.identity, Error(code.value, "you do not read; this session is over"), session.door)
        self._on_gone(session, code)

    def statistics(self) -> SessionStatistics:
        return self.sessions.statistics()
