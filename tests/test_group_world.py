"""Real worker processes for the tests of the healing group, and the first test: they come up, heal and go down.

Workers are forked from a server that has imported torch and done nothing else: a test need not import it again.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from regrow.group import Fabric, Mode

WAIT_S = 40.0
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh", "regrow.group", __name__]
)


class Member:
    """A worker's side: its place, its fabric, and the pipe to the test. Commands named abort are obeyed by a thread."""

    def __init__(self, pipe, rank, size, port, prefix):
        self.pipe, self.rank, self.size = pipe, rank, size
        base = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S))
        self.store = dist.PrefixStore(prefix, base) if prefix else base
        self.fabric = None
        self.newest = 0
        self._inbox = []
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while True:
            try:
                word, *rest = self.pipe.recv()
            except (EOFError, OSError):
                os._exit(3)  # the test is gone
            if word == "abort":  # what the watcher of a real worker does
                self.newest = rest[0]
                self.fabric.abort("told by the test", below=rest[0])
            else:
                with self._news:
                    self._inbox.append((word, *rest))
                    self._news.notify()

    def hear(self, word):
        with self._news:
            assert self._news.wait_for(lambda: self._inbox, WAIT_S), f"{word} did not come"
            got, *rest = self._inbox.pop(0)
        assert got == word, (got, word)
        return rest[0] if rest else None

    def say(self, *words):
        self.pipe.send(words)

    def weave(self, mode=Mode.RECORDING, generation=0, record=None, **options):
        self.newest = generation
        self.fabric = Fabric(
            rank=self.rank,
            world_size=self.size,
            generation=generation,
            store=self.store,
            timeout=options.pop("timeout", timedelta(seconds=WAIT_S)),
            mode=mode,
            record=record,
            **options,
        )
        self.fabric.install()
        return self.fabric

    def init(self, backend="regrow"):
        dist.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=WAIT_S)
        )

    def reconnect(self, generation, wait_s=WAIT_S):
        self.newest = max(self.newest, generation)
        self.fabric.reconnect(
            generation, superseded=lambda: self.newest > generation, deadline=time.monotonic() + wait_s
        )


def _main(scenario, pipe, rank, size, port, prefix, args):
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(WAIT_S / 2)  # a hang tells where
    try:
        member = Member(pipe, rank, size, port, prefix)
        scenario(member, *args)
        pipe.send(("over",))
    except BaseException:
        pipe.send(("broke", traceback.format_exc()))
        raise


class Worker:
    """The test's side of one worker."""

    def __init__(self, scenario, rank, size, port, prefix, args):
        self.rank = rank
        self._pipe, theirs = CONTEXT.Pipe()
        arguments = (scenario, theirs, rank, size, port, prefix, args)
        self.process = CONTEXT.Process(target=_main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *words):
        self._pipe.send(words)

    def hear(self, word):
        assert self._pipe.poll(WAIT_S), f"rank {self.rank} did not say {word} in time"
        try:
            got, *rest = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"rank {self.rank} ended, wanted {word}") from None
        assert got == word, f"rank {self.rank} said {got} instead of {word}: {rest[0] if rest else ''}"
        return rest[0] if rest else None

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        """SIGKILL, and wait until the process is gone."""
        self.signal(signal.SIGKILL)
        self.process.join(WAIT_S)

    def finish(self):
        """Hear the end and require a clean exit."""
        self.hear("over")
        self.process.join(WAIT_S)
        assert self.process.exitcode == 0


class World:
    """The test's side: a store in this process, and the workers."""

    def __init__(self):
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers = []

    def start(self, scenario, rank, size, *args, prefix=""):
        worker = Worker(scenario, rank, size, self.server.port, prefix, args)
        self.workers.append(worker)
        return worker

    def start_all(self, scenario, size, *args):
        return [self.start(scenario, rank, size, *args) for rank in range(size)]

    def close(self):
        for worker in self.workers:
            if worker.process.is_alive():
                worker.kill()


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def _comes_and_goes(member):
    fabric = member.weave()
    member.init()
    fabric.seal()
    total = torch.full((5,), float(member.rank))
    assert fabric.intact()  # asked before each operation: once it is over, another rank may have gone on to abort
    dist.all_reduce(total)
    assert fabric.ops_issued == 1
    for generation in (1, 2, 3):
        fabric.abort("exercise")
        assert not fabric.intact()
        member.reconnect(generation)
        assert fabric.intact() and fabric.generation == generation
        dist.all_reduce(total)
    assert not fabric.waiting
    assert fabric.world is dist.group.WORLD and fabric.groups == [dist.group.WORLD]
    member.say("total", total.tolist())
    dist.destroy_process_group()
    member.init()  # in the same generation, where the store still has the old group's addresses
    dist.all_reduce(total)
    assert total[0] == 243
    dist.destroy_process_group()
    fabric.close()


def test_comes_up_heals_and_goes_down(world):
    workers = world.start_all(_comes_and_goes, 3)
    for worker in workers:
        assert worker.hear("total") == [81.0] * 5
    for worker in workers:
        worker.finish()
