"""The tokens that one session may still sample, divided among calls in flight.

A call reserves as many tokens as it may sample, and gives back those that it did not use. If too few are left while
other calls hold reservations, it waits, first come, first served: a call is never cut short or refused because of
tokens that another call gives back later. So calls that name a limit (`max_tokens`, `rollout.turn_tokens`) run at the
same time as long as their limits fit together; calls without one run one after the other.
"""

from __future__ import annotations

import asyncio


class TokenBudget:
    def __init__(self, tokens: int) -> None:
        self.left = tokens
        """Tokens that are neither used nor reserved."""
        self._reserved = 0
        self._turn = asyncio.Lock()
        """Held by the first call that waits."""
        self._given_back = asyncio.Event()

    async def reserve(self, wanted: int) -> int:
        """Reserve `wanted` tokens, or fewer if the session has no more. 0: it has none left."""
        async with self._turn:
            while self.left < wanted and self._reserved:
                self._given_back.clear()
                await self._given_back.wait()
            granted = min(wanted, self.left)
            self.left, self._reserved = self.left - granted, self._reserved + granted
            return granted

    def settle(self, reserved: int, used: int) -> None:
        """End a reservation of which `used` tokens were sampled."""
        self.left, self._reserved = self.left + reserved - used, self._reserved - reserved
        self._given_back.set()
