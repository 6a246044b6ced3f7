"""A real etcd of three members on loopback, each of which can be killed, stopped and brought back."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import time
import urllib.request

from harness import free_port

DEADLINE_S = 30.0
INSTALLED = shutil.which("etcd") is not None
MISSING = "etcd is not installed: run make system as root, or apt-get install etcd-server etcd-client"


class Cluster:
    def __init__(self, directory, size=3):
        self.directory = directory
        self.ports = []
        while len(set(self.ports)) < 2 * size:
            self.ports.append(free_port())
        self.ports = list(dict.fromkeys(self.ports))
        self.endpoints = [("127.0.0.1", port) for port in self.ports[:size]]
        self._peers = [f"http://127.0.0.1:{port}" for port in self.ports[size:]]
        self._processes = [None] * size
        try:
            for member in range(size):
                self.start(member)
            self.until_whole()
        except BaseException:
            self.close()
            raise

    @property
    def url(self):
        return "etcd://" + ",".join(f"{host}:{port}" for host, port in self.endpoints)

    def start(self, member):
        """Start a member, or bring it back with the data that it had."""
        client = f"http://127.0.0.1:{self.endpoints[member][1]}"
        peers = ",".join(f"m{number}={peer}" for number, peer in enumerate(self._peers))
        words = ["--name", f"m{member}", "--data-dir", str(self.directory / f"m{member}"), "--initial-cluster", peers]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", self._peers[member], "--initial-advertise-peer-urls", self._peers[member]]
        # it ends when the thread does that starts it, however that comes: so start it from the main thread
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self.directory / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen([*guard, "etcd", *words], stdout=log, stderr=log)

    def kill(self, member):
        self._processes[member].kill()
        self._processes[member].wait()

    def stop(self, member):
        self._processes[member].send_signal(signal.SIGSTOP)

    def go_on(self, member):
        self._processes[member].send_signal(signal.SIGCONT)

    def close(self):
        for process in self._processes:
            if process is not None:
                process.kill()
                process.wait()

    def ask(self, member, path, **body):
        host, port = self.endpoints[member]
        request = urllib.request.Request(f"http://{host}:{port}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def leader(self):
        """The number of the member that leads; None if a living one knows of none, or cannot be asked."""
        ids, leaders = {}, set()
        for member, process in enumerate(self._processes):
            if process.poll() is None:
                try:
                    status = self.ask(member, "maintenance/status")
                except OSError:
                    return None
                ids[status["header"]["member_id"]] = member
                leaders.add(status.get("leader"))
        return ids.get(leaders.pop()) if len(leaders) == 1 else None

    def until_whole(self):
        """Bring back whoever is away and wait until all agree on a leader and take writes."""
        for member, process in enumerate(self._processes):
            process.send_signal(signal.SIGCONT)
            if process.poll() is not None:
                self.start(member)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self.leader() is not None:
                    for member in range(len(self.endpoints)):
                        self.ask(member, "kv/put", key="cHJvYmU=", value="")
                    return
            time.sleep(0.05)
        logs = [path.read_text()[-1000:] for path in self.directory.glob("*.log")]
        raise AssertionError("\n".join(["etcd does not start", *logs]))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


class Watching:
    """Collects what a watch tells."""

    def __init__(self, store, prefix):
        self.changes = []
        self._task = asyncio.create_task(self._watch(store, prefix))

    async def _watch(self, store, prefix):
        async for change in store.watch(prefix):
            self.changes.append(change)

    async def told(self, count):
        await until(lambda: len(self.changes) >= count or self._task.done())
        if self._task.done():
            self._task.result()

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
