"""Work that nobody waits for, of which nothing may fail unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from regrow.agent.store import StoreLost


class Tasks:
    """Keeps tasks alive, and tells the event loop's handler what goes wrong in them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run. That the store is lost is nobody's business here: the agent learns it by its own requests."""
        loop = asyncio.get_running_loop()

        async def guarded() -> None:
            try:
                await work
            except StoreLost:
                pass
            except Exception as error:  # noqa: BLE001  the agent's handler ends the run: nothing may fail unseen
                loop.call_exception_handler({"message": "a task of the crew failed", "exception": error})

        task = loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
