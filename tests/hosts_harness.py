"""Several agents as the hosts of one run, and what can be done to a host."""

import signal
import time

import psutil

from agent_harness import Job
from harness import free_port

TOKEN = {"REGROW_TOKEN": "a secret of all"}
DEAD_AFTER_S = 2.0
NOISE_S = 1.0
"""What two shared cores may add to any time."""


class Hosts:
    """The hosts of one run."""

    def __init__(self, directory, meet=None, lab=None):
        """``meet``: how they find their store, if that is not the first one's; with a lab each is on its own host."""
        self.directory = directory
        self.meet = meet or ["--rdzv-endpoint", f"{lab.address(0) if lab else '127.0.0.1'}:{free_port()}"]
        self.lab = lab
        self.jobs = []

    def start(self, *words, nnodes="2", nproc=1, plan=None):
        number = len(self.jobs)
        directory = self.directory / f"host{number}"
        directory.mkdir()
        common = ["--nnodes", nnodes, "--nproc-per-node", str(nproc), *self.meet, "--dead-after", str(DEAD_AFTER_S)]
        plan = {"gate": True, **(plan or {})}
        enter = None if self.lab is None else lambda: self.lab.enter(number)
        self.jobs.append(Job(directory, *common, *words, env=TOKEN, notes=self.directory, plan=plan, enter=enter))
        return self.jobs[-1]

    def trained(self, size):
        for rank in range(size):
            self.jobs[0].note("steps done", rank=rank)

    def resumed(self, generation, **incarnations):
        for rank, incarnation in incarnations.items():
            self.jobs[0].note("resumed", rank=int(rank[1:]), incarnation=incarnation, generation=generation)

    def joined(self, count):
        """Wait until so many standbys are members."""
        zero = self.jobs[0]
        zero.until(lambda: sum(len(job.events("host_joined")) for job in self.jobs) >= count, "standbys")

    def finish(self, *jobs):
        jobs[0].open_gate()
        codes = [job.wait() for job in jobs]
        assert codes == [0] * len(jobs), "\n".join(job.err for job in jobs)
        self.assert_one_holder_at_a_time()
        for job in jobs:
            job.assert_clean()

    def close(self):
        for job in self.jobs:
            signal_all(job, signal.SIGCONT)
            job.kill()

    def events(self, name):
        """What all of them have told, by time."""
        return sorted((event for job in self.jobs for event in job.events(name)), key=lambda event: event["t"])

    def assert_one_holder_at_a_time(self):
        newest = {}
        for note in sorted(self.jobs[0].notes(), key=lambda note: note["t"]):
            if note["rank"] is not None:
                assert note["incarnation"] >= newest.get(note["rank"], 0), f"{note} by one that was replaced"
                newest[note["rank"]] = note["incarnation"]


def signal_all(job, number):
    """Signal a host's agent, then everything below it."""
    try:
        agent = psutil.Process(job.pid)
        everyone = [agent, *agent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in everyone:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def kill(*jobs):
    """End hosts as a power failure would; return when."""
    t = time.time()
    for job in jobs:
        job.signal(signal.SIGKILL)
    for job in jobs:
        job.wait()
    return t


def noticed_s(job, since_t, count=1):
    lost = job.until(lambda: events if len(events := job.events("host_lost")) >= count else None, "the loss")
    return lost[-1]["t"] - since_t
