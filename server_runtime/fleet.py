"""The update that a running server offers: tells connected devices, answers those that come, keeps what they say.

Whose turn it is, is `rollout`'s part, files are `offers`'s. A device that works on a run hears of an offer in its
session and comes for it in one of its own (purpose "update") when it has nothing to do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from contract.errors import CutlayerError, PackageError, RefusedError, why
from contract.messages import UPDATES, Fetch, Message, Offer, Piece, Verdict

from .admission import Joined
from .offers import Box, Stock
from .rollout import Rollout

T = TypeVar("T")


class Line(Protocol):
    """A device's connection, as far as an offer goes."""

    @property
    def joined(self) -> Joined | None: ...

    def say(self, message: Message) -> None: ...


class Fleet:
    """Of one server. `in_store` runs what waits for the disk."""

    def __init__(self, box: Box, in_store: Callable[..., Awaitable[T]], say: Callable[[str], None]) -> None:
        self.rollout: Rollout | None = None
        self._box, self._in_store, self._say = box, in_store, say
        self._stock: Stock | None = None
        self._version: int | None = None

    async def look(self, present: Mapping[str, Line]) -> None:
        """Take up an offer that came, changed or was withdrawn; connected devices hear of it."""
        version = self._box.version()
        if version == self._version:
            return
        try:
            rollout = await self._in_store(self._box.read)
            stock = None if rollout is None else await self._in_store(Stock, rollout.offered)
        except CutlayerError as error:
            self._offer_nothing(error)
            rollout = stock = None
        self.rollout, self._stock, self._version = rollout, stock, version  # type: ignore[assignment]
        if self.rollout is not None:
            offered = self.rollout.offered
            self._say(f"offering {offered.name} version {offered.version} to {len(offered.devices)} devices")
        await self.tell(present)

    def _offer_nothing(self, error: CutlayerError) -> None:
        """Until an operator has done something about it."""
        self._say(f"warning: nothing is offered to the devices: {error.cause}\n  cure: {error.cure}")
        self.rollout = self._stock = None

    async def tell(self, present: Mapping[str, Line]) -> None:
        """Offer the package to those connected whose turn it is."""
        for line in present.values():
            await self.meet(line)

    async def meet(self, line: Line) -> None:
        """Offer the package to a device in a run, if it takes packages and it is its turn."""
        joined = line.joined
        if joined is not None and joined.purpose == "adapt" and UPDATES in joined.features:
            offer = await self._offer(joined)
            if offer.package is not None:
                line.say(offer)

    async def visit(self, line: Line) -> None:
        """Answer a device that came for a package."""
        if line.joined is not None:
            line.say(await self._offer(line.joined))

    async def _offer(self, joined: Joined) -> Offer:
        nothing, name = Offer(None, 0, 0, False), joined.device.name
        if self.rollout is None:
            return nothing
        offered = self.rollout.offered
        if joined.package_digest == offered.package:
            await self._take(name, "ok", "")
            return nothing
        if not self.rollout.offer(name):
            return Offer(None, 0, 0, self.rollout.waits(name))
        await self._keep()
        if self.rollout is None:
            return nothing
        return Offer(offered.package, offered.version, offered.size_bytes, False)

    async def piece(self, device: str, fetch: Fetch) -> Piece:
        """What a device fetches that was offered it. Raises: RefusedError."""
        stock = self._stock
        if stock is None or self.rollout is None or not self.rollout.may_fetch(device):
            raise RefusedError("package: none is offered now", "nothing is to be done", "offer", 60.0)
        try:
            return await self._in_store(stock.piece, fetch)  # type: ignore[return-value]
        except PackageError as error:
            if self._stock is stock:  # else a newer offer has come meanwhile, which is another matter
                self._offer_nothing(error)
            raise RefusedError(f"package: {error.cause}", "the server's operator was told", "offer", 600.0) from error

    async def judge(self, device: str, verdict: Verdict, present: Mapping[str, Line]) -> None:
        """Keep what a device says of the package; others may be offered it now."""
        if self.rollout is None or verdict.package != self.rollout.offered.package:
            return  # of an offer that is no more
        await self._take(device, verdict.verdict, verdict.reason)
        await self.tell(present)

    async def _take(self, device: str, word: str, reason: str) -> None:
        assert self.rollout is not None
        before = self.rollout.of(device), self.rollout.phase
        self.rollout.take(device, word, reason)
        after = self.rollout.of(device), self.rollout.phase
        if after == before:
            return
        await self._keep()
        self._say(f"update: device {device}: {after[0]}")
        if after[1] != before[1]:
            told = {
                "stopped": "stopped: a canary did not take it, and nobody else is offered it",
                "rest": "the canaries are content: the others are offered it",
                "complete": "every device has answered",
            }
            self._say(f"update: {told[after[1]]}")

    async def _keep(self) -> None:
        """What is not kept is not offered: a server that is started again would take other canaries."""
        try:
            await self._in_store(self._box.keep, self.rollout)
        except OSError as error:
            self._say(f"warning: nothing is offered to the devices: {self._box.root} cannot be written ({why(error)})")
            self.rollout = self._stock = None
