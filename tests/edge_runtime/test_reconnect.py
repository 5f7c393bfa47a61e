from __future__ import annotations

import random
import ssl
from datetime import datetime, timezone

import pytest

from edge_runtime.reconnect import BUILT, Backoff, explain

NOW = datetime(2027, 1, 1, tzinfo=timezone.utc)


def waits(backoff: Backoff, count: int, lasted_s: float = 0.0, progressed: bool = False) -> list[float]:
    return [backoff.next_wait_s(lasted_s, progressed, None) for _ in range(count)]


def test_wi_03_waits_are_jittered_doubled_and_bounded() -> None:
    first = [waits(Backoff(random.Random(seed)), 1)[0] for seed in range(200)]
    assert min(first) < 0.1 and 0.9 < max(first) <= 1.0
    series = waits(Backoff(random.Random(1)), 90)
    assert max(series[:3]) <= 4.0 and 150.0 < max(series) <= 300.0


def test_a_server_that_is_back_within_a_minute_is_found_soon() -> None:
    for seed in range(20):
        backoff, outage_s = Backoff(random.Random(seed)), 0.0
        while outage_s < 55.0:
            wait_s = backoff.next_wait_s(0.0, False, None)
            assert wait_s <= 4.0
            outage_s += wait_s


def test_wi_03_fifty_devices_do_not_come_back_in_one_second() -> None:
    # The server was away for a while: each device has tried some times before it comes back.
    for away_s in (20.0, 200.0):
        returned = []
        for seed in range(50):
            backoff, now_s = Backoff(random.Random(seed)), 0.0
            while now_s < away_s:
                now_s += backoff.next_wait_s(0.0, False, None)
            returned.append(now_s)
        assert sum(away_s <= each < away_s + 1.0 for each in returned) < 25


def test_progress_or_a_minute_of_health_starts_the_count_anew() -> None:
    for lasted_s, progressed in ((60.0, False), (0.1, True)):
        backoff = Backoff(random.Random(3))
        assert max(waits(backoff, 60, lasted_s=10.0)) > 60.0
        assert backoff.next_wait_s(lasted_s, progressed, None) <= 1.0


def test_being_let_in_and_dropped_at_once_is_a_failure_like_any_other() -> None:
    assert max(waits(Backoff(random.Random(3)), 60, lasted_s=2.0)) > 60.0


def test_a_wait_is_never_shorter_than_the_server_asked_for() -> None:
    backoff = Backoff(random.Random(4))
    assert all(backoff.next_wait_s(0.0, False, 30.0) >= 30.0 for _ in range(20))


def certificate_error(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "certificate is not yet valid" if code == 9 else "self-signed"
    return error


@pytest.mark.parametrize(
    ("error", "now", "said"),
    [
        (certificate_error(18), datetime(1970, 1, 1, tzinfo=timezone.utc), "clock is not set: it shows 1970-01-01"),
        (certificate_error(9), NOW, "clock shows"),
        (certificate_error(18), NOW, "not trusted: self-signed"),
        (TimeoutError(), NOW, "did not answer in time"),
        (ConnectionRefusedError(111, "Connection refused"), NOW, "cannot be reached: Connection refused"),
        (OSError(-2, "Name or service not known"), datetime(1970, 1, 1, tzinfo=timezone.utc), "cannot be reached"),
        (RuntimeError("closed"), NOW, "ended: closed"),
    ],
)
def test_de_02_the_fault_is_named(error: Exception, now: datetime, said: str) -> None:
    told = explain(error, "wss://server", now, BUILT)
    assert said in told.cause and told.cure
