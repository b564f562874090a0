"""A TCP proxy on loopback that holds everything back for a while: a long way in a bottle.

    python tests/infra/delay_proxy.py TARGET_PORT ONE_WAY_MS      prints the port that it listens on; ends with its
                                                                  standard input

What arrives is passed on after the time of one way, in both directions, however much is under way; nothing limits the
rate but the processor.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

READ_BYTES = 256 << 10
MAX_HELD_BYTES = 64 << 20
"""More than any window of the measured programs."""


@contextmanager
def delayed_port(target_port: int, *, one_way_ms: float) -> Iterator[int]:
    """A port from which it is so far to the other, while the block runs."""
    command = [sys.executable, __file__, str(target_port), str(one_way_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        try:
            yield int(proxy.stdout.readline())
        finally:
            proxy.kill()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delay_s: float) -> None:
    """Pass everything on after the delay, and then the end."""
    loop = asyncio.get_running_loop()
    held: deque[tuple[float, bytes]] = deque()
    has_some, has_room = asyncio.Event(), asyncio.Event()
    has_room.set()
    num_held = 0

    async def deliver() -> None:
        nonlocal num_held
        while True:
            await has_some.wait()
            due, content = held.popleft()
            if not held:
                has_some.clear()
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not content:
                writer.write_eof()
                return
            writer.write(content)
            await writer.drain()
            num_held -= len(content)
            if num_held < MAX_HELD_BYTES:
                has_room.set()

    delivery = asyncio.create_task(deliver())
    content = b"."
    try:
        while content:
            await has_room.wait()
            content = await reader.read(READ_BYTES)
            held.append((loop.time() + delay_s, content))
            num_held += len(content)
            has_some.set()
            if num_held >= MAX_HELD_BYTES:
                has_room.clear()
        await delivery
    finally:
        delivery.cancel()  # where a program ended early


async def serve(target_port: int, *, delay_s: float) -> None:
    """Listen until nobody is left at the other end of standard input."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", target_port, limit=READ_BYTES)
        with suppress(OSError):  # a program that ended early
            await asyncio.gather(
                carry(reader, target_writer, delay_s=delay_s), carry(target_reader, writer, delay_s=delay_s)
            )
        for stream in (writer, target_writer):
            stream.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=READ_BYTES)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), delay_s=float(sys.argv[2]) / 1000))
