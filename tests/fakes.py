"""Owns the fakes that tests move by hand. Checked against the real thing where there is one."""


class FakeClock:
    """Time that passes when told to."""

    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    def advance(self, seconds: float) -> float:
        self.at += seconds
        return self.at


class ScriptedProcess:
    """A worker process that does what the test says: run, end with a status, or ignore being killed."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_stuck = False
        self.signals: list[str] = []

    def exit(self, status: int) -> None:
        self.status = status

    def kill(self) -> None:
        self.signals.append("kill")
        if not self.is_stuck and self.status is None:
            self.status = -9

    def terminate(self) -> None:
        self.signals.append("terminate")
        if not self.is_stuck and self.status is None:
            self.status = 0
