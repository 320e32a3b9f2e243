"""Clocks that a test holds: of a simulated day, of machines that are wrong by something, and of a real PostgreSQL."""

import psycopg

START_S = 1_900_000_000.0
DAY_S = 86_400.0


class HeldClock:
    """The right time; it goes on when the test says so."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s

    def ticks(self) -> float:
        """Return what a monotonic clock shows, which nobody sets."""
        return self.now_s - START_S


class WrongClock:
    """A machine's clock that is ahead of the right one (behind, where negative)."""

    def __init__(self, right: HeldClock, ahead_s: float) -> None:
        self._right = right
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return self._right() + self.ahead_s


class PostgresClock:
    """The clock of a PostgreSQL server, for those who connect after this: ``clock_timestamp()`` of an own schema."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        for statement in (
            "CREATE SCHEMA held",
            "CREATE TABLE held.clock (now_s float8)",
            "INSERT INTO held.clock VALUES (0)",
            """CREATE FUNCTION held.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
            AS 'SELECT to_timestamp(now_s) FROM held.clock'""",
            "ALTER ROLE kvgate SET search_path = held, pg_catalog, public",
        ):
            self._connection.execute(statement)

    def set(self, now_s: float) -> None:
        self._connection.execute("UPDATE held.clock SET now_s = %s", [now_s])

    def close(self) -> None:
        self._connection.close()


__all__ = ["DAY_S", "START_S", "HeldClock", "PostgresClock", "WrongClock"]
