"""Workers' ``store`` requests answered from the control store, as ``torch.distributed.Store`` would answer.

The workers' keys live under ``kv/``. A get or wait for a key that is not there yet waits for it, up to its deadline;
nothing here blocks the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from regrow.agent.store import ControlStore, StoreLost
from regrow.wire import Frame, encode

PREFIX = "kv/"


async def answer(store: ControlStore, request: Frame) -> bytes:
    """Return the reply's bytes; an error becomes a reply too."""
    head = request.head
    reply: dict[str, Any] = {"type": "reply", "id": head.get("id"), "ok": True, "value": None, "error": None}
    try:
        reply["value"], blob = await _perform(store, head, request.blob)
    except TimeoutError:
        keys = head.get("keys") or [head.get("key")]
        reply |= {
            "ok": False,
            "error": f"timeout: {', '.join(map(str, keys))} not set within {head.get('timeout_s')} s",
        }
        blob = b""
    except (KeyError, ValueError, TypeError) as error:
        reply |= {"ok": False, "error": f"bad request: {error!r}"}
        blob = b""
    except StoreLost as error:
        reply |= {"ok": False, "error": str(error)}
        blob = b""
    return encode(reply, blob)


async def purge(store: ControlStore, prefix: str) -> None:
    """Drop the workers' keys under a prefix (those of a generation that is over)."""
    with contextlib.suppress(StoreLost):
        await store.delete(PREFIX + prefix, prefix=True)


async def _perform(store: ControlStore, head: dict[str, Any], blob: bytes) -> tuple[Any, bytes]:
    match head["op"]:
        case "get":
            return None, await _get(store, PREFIX + head["key"], _timeout(head))
        case "set":
            await store.put(PREFIX + head["key"], blob)
            return None, b""
        case "add":
            return await _add(store, PREFIX + head["key"], int(head["amount"])), b""
        case "check":
            found = [await store.get(PREFIX + key) is not None for key in _keys(head)]
            return all(found), b""
        case "wait":
            async with asyncio.timeout(_timeout(head)):
                for key in _keys(head):
                    await _get(store, PREFIX + key, None)
            return None, b""
        case "delete":
            return await store.delete(PREFIX + head["key"]) > 0, b""
        case "compare_set":
            split = int(head["expected_len"])
            return None, await _compare_set(store, PREFIX + head["key"], blob[:split], blob[split:])
        case "num_keys":
            return len(await store.keys(PREFIX)), b""
        case "list_keys":
            return [key.removeprefix(PREFIX) for key in await store.keys(PREFIX)], b""
        case op:
            raise ValueError(f"unknown op {op!r}")


def _keys(head: dict[str, Any]) -> list[str]:
    return list(head["keys"]) if head.get("keys") is not None else [head["key"]]


def _timeout(head: dict[str, Any]) -> float | None:
    timeout_s = head.get("timeout_s")
    return None if timeout_s is None else float(timeout_s)


async def _get(store: ControlStore, key: str, timeout_s: float | None) -> bytes:
    if (entry := await store.get(key)) is not None:
        return entry.value
    async with asyncio.timeout(timeout_s), contextlib.aclosing(store.watch(key)) as changes:  # type: ignore[type-var]
        async for change in changes:
            if change.key == key and change.value is not None:
                return change.value
    raise StoreLost("the watch ended")


async def _add(store: ControlStore, key: str, amount: int) -> int:
    while True:
        entry = await store.get(key)
        total = amount + (0 if entry is None else int(entry.value))
        if await store.compare_and_set(key, 0 if entry is None else entry.version, b"%d" % total) is not None:
            return total


async def _compare_set(store: ControlStore, key: str, expected: bytes, desired: bytes) -> bytes:
    while True:
        entry = await store.get(key)
        if entry is None and expected:
            return expected  # as TCPStore answers for a key that is not there
        if entry is not None and entry.value != expected:
            return entry.value
        if await store.compare_and_set(key, 0 if entry is None else entry.version, desired) is not None:
            return desired
