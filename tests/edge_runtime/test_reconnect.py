from __future__ import annotations

import random
import ssl
from datetime import datetime, timezone

import pytest

from edge_runtime.reconnect import BUILT, Backoff, explain

NOW = datetime(2027, 1, 1, tzinfo=timezone.utc)


def test_wi_03_waits_are_jittered_doubled_and_bounded() -> None:
    waits = [[Backoff(random.Random(seed)).next_wait_s(0.0, None)] for seed in range(200)]
    assert min(waits)[0] < 0.1 and 0.9 < max(waits)[0] <= 1.0
    backoff = Backoff(random.Random(1))
    series = [backoff.next_wait_s(0.0, None) for _ in range(60)]
    assert max(series[:3]) <= 4.0 and 150.0 < max(series) <= 300.0


def test_wi_03_fifty_devices_do_not_come_back_in_one_second() -> None:
    # The server was away for a while: each device has tried some times before it comes back.
    returned = []
    for seed in range(50):
        backoff, now_s = Backoff(random.Random(seed)), 0.0
        while now_s < 20.0:
            now_s += backoff.next_wait_s(0.0, None)
        returned.append(now_s)
    assert sum(20.0 <= each < 21.0 for each in returned) < 10


def test_only_a_minute_of_health_starts_the_count_anew() -> None:
    backoff = Backoff(random.Random(3))
    for _ in range(10):
        backoff.next_wait_s(59.0, None)
    assert max(backoff.next_wait_s(59.0, None) for _ in range(20)) > 60.0
    assert backoff.next_wait_s(60.0, None) <= 1.0


def test_a_wait_is_never_shorter_than_the_server_asked_for() -> None:
    backoff = Backoff(random.Random(4))
    assert all(backoff.next_wait_s(0.0, 30.0) >= 30.0 for _ in range(20))


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
