"""An amount that is divided among calls: the tokens that a session may still sample, or the bytes of bodies in flight.

A call reserves as much as it may use, and gives back what it did not use. If too little is left while other calls hold
reservations, it waits, first come, first served: a call is never cut short or refused because of an amount that another
call gives back later. So calls that name a limit (`max_tokens`, `rollout.turn_tokens`) run at the same time as long as
their limits fit together; calls without one run one after the other.
"""

from __future__ import annotations

import asyncio


class Budget:
    def __init__(self, amount: int) -> None:
        self.left = amount
        """What is neither used nor reserved."""
        self._reserved = 0
        self._turn = asyncio.Lock()
        """Held by the first call that waits."""
        self._given_back = asyncio.Event()

    async def reserve(self, wanted: int) -> int:
        """Reserve `wanted`, or less if the budget has no more. 0: nothing is left."""
        async with self._turn:
            while self.left < wanted and self._reserved:
                self._given_back.clear()
                await self._given_back.wait()
            granted = min(wanted, self.left)
            self.left, self._reserved = self.left - granted, self._reserved + granted
            return granted

    def settle(self, reserved: int, used: int = 0) -> None:
        """End a reservation of which `used` is gone for good."""
        self.left, self._reserved = self.left + reserved - used, self._reserved - reserved
        self._given_back.set()
