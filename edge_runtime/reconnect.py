"""When to try again, and what to tell the operator meanwhile: pure answers to failed connections.

Waiting and connecting are left to `client`.
"""

from __future__ import annotations

import random
import ssl
from dataclasses import dataclass
from datetime import datetime, timezone

from contract.errors import CutlayerError

BUILT = datetime(2026, 11, 1, tzinfo=timezone.utc)  # no clock that is right shows less
CERTIFICATE_CURE = (
    "give --certificate and --certificate-key, by a CA that the server's --client-ca names (tools/make_keys "
    "--certificate NAME)"
)
CERTIFICATE_NOT_YET_VALID = 9  # X509_V_ERR_CERT_NOT_YET_VALID


@dataclass(frozen=True)
class BackoffLimits:
    """Full jitter: each wait is drawn between 0 and a bound that doubles (WI-03)."""

    first_s: float = 1.0
    longest_s: float = 300.0
    healthy_s: float = 60.0  # a connection that lasted so long was no failure
    # A server that is being restarted is back within the minute: until then knocking often costs next to nothing.
    early_s: float = 60.0
    early_longest_s: float = 4.0


class Backoff:
    """How long to wait before the next attempt."""

    def __init__(self, rng: random.Random, limits: BackoffLimits | None = None) -> None:
        self._rng, self._limits = rng, limits or BackoffLimits()
        self._failures = 0
        self._outage_s = 0.0  # since the last connection that got anything done

    def next_wait_s(self, lasted_s: float, progressed: bool, retry_after_s: float | None) -> float:
        """Seconds to wait after a connection that lasted `lasted_s`; never less than the server asked for.

        One that `progressed`, or held for long, starts the count anew; being let in and dropped at once does not.
        """
        limits = self._limits
        if progressed or lasted_s >= limits.healthy_s:
            self._failures, self._outage_s = 0, 0.0
        else:
            self._outage_s += lasted_s
        longest_s = limits.early_longest_s if self._outage_s < limits.early_s else limits.longest_s
        bound_s = min(longest_s, limits.first_s * 2.0 ** min(self._failures, 16))
        self._failures += 1
        wait_s = (retry_after_s or 0.0) + self._rng.uniform(0.0, bound_s)
        self._outage_s += wait_s
        return wait_s


@dataclass(frozen=True)
class Failure:
    """Why no conversation came about, in words."""

    cause: str
    cure: str


class EndedAfterTls(ConnectionError):
    """The server ended the connection when TLS stood, before it had said a word."""


def tls_alert(error: BaseException | None) -> str | None:
    """The alert by which the server ended TLS, as OpenSSL calls it, wherever in the chain of causes it is."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        is_tls = isinstance(error, ssl.SSLError)
        reason = (getattr(error, "reason", None) if is_tls else None) or ""  # "TLSV1_ALERT_UNKNOWN_CA"
        if "ALERT_" in reason:
            return reason.split("ALERT_")[-1].replace("_", " ").lower()
        error = error.__cause__ or error.__context__
    return None


def explain(error: BaseException, server: str, now: datetime, clock_floor: datetime) -> Failure:
    """Name the fault that an operator can mend: clock, certificate, name, network.

    `clock_floor` is a time that has certainly passed; a clock before it is not set (DE-02).
    """
    if isinstance(error, CutlayerError):
        return Failure(error.cause, error.cure)
    if isinstance(error, EndedAfterTls):
        return Failure(
            f"{server} ended the connection right after TLS: it may ask for a certificate of this device, or not "
            "accept the one that it has",
            f"where it has --client-ca, {CERTIFICATE_CURE}; else nothing, if it comes back",
        )
    alert = tls_alert(error)
    if alert == "certificate required":
        return Failure(f"{server} asks for a certificate of this device, and there is none", CERTIFICATE_CURE)
    if alert is not None and ("certificate" in alert or alert == "unknown ca"):
        return Failure(f"{server} does not accept the certificate of this device: {alert}", CERTIFICATE_CURE)
    if isinstance(error, ssl.SSLError) and now < clock_floor:
        return Failure(
            f"{server} cannot be trusted because this device's clock is not set: "
            f"it shows {now:%Y-%m-%d %H:%M} UTC, before {clock_floor:%Y-%m-%d}",
            "set the clock or let NTP do it; edge-run goes on by itself then, and nothing is lost",
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == CERTIFICATE_NOT_YET_VALID:
            return Failure(
                f"the certificate of {server} is valid from a later time than this device's clock shows "
                f"({now:%Y-%m-%d %H:%M} UTC)",
                "check the clock of this device first, then the certificate's dates",
            )
        return Failure(
            f"the certificate of {server} is not trusted: {error.verify_message}",
            "give --ca the certificate that signed the server's, and check the host name",
        )
    if isinstance(error, ssl.SSLError):
        return Failure(
            f"TLS with {server} failed: {error.reason or error}", "check that the server speaks TLS on this port"
        )
    if isinstance(error, TimeoutError):
        return Failure(f"{server} did not answer in time", "check the network and whether server-run is running")
    if isinstance(error, OSError):
        return Failure(
            f"{server} cannot be reached: {error.strerror or error}",
            "check the network, the name and whether server-run is running",
        )
    return Failure(
        f"the connection to {server} ended: {error or type(error).__name__}",
        "nothing to do if it comes back; else look at the server's log",
    )
