"""A real job loses a host: a standby's worker takes the rank, and all connections are made again.

What becomes of the training then is the plan's affair, and not looked at here.
"""

import os
import signal
import subprocess
import sys
import time

from agent_harness import AT_ONCE_S
from harness import SCRIPT, free_port
from regrow import events

DEADLINE_S = 90.0


def test_a_standby_joins_the_generation_of_a_lost_host(tmp_path):
    port = free_port()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "REGROW_TOKEN": "a secret of all"}
    agents = []

    def start(*words):
        name = f"host{len(agents)}"
        command = [sys.executable, "-m", "regrow", "run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        command += ["--log-dir", str(tmp_path / name), "--start-method", "spawn", *words]
        command += [str(SCRIPT), "--steps", "100000", "--out", str(tmp_path / "out")]
        with (tmp_path / f"{name}.err").open("w") as err:
            agents.append(subprocess.Popen(command, env=environ, stdout=err, stderr=err, start_new_session=True))

    def until(name, count=1, **match):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            found = [event for n in range(3) for event in events.read(tmp_path / f"host{n}") if event["event"] == name]
            if len(found := [one for one in found if match.items() <= one.items()]) >= count:
                return found
            time.sleep(0.1)
        texts = [(tmp_path / f"host{n}.err").read_text()[-2000:] for n in range(3)]
        raise AssertionError("\n".join([f"no {name} {match}", *texts]))

    try:
        start("--node-rank", "0")
        start("--node-rank", "1", "--host-addr", "127.0.0.2")
        start("--standby", "--spares", "1", "--host-addr", "127.0.0.3")
        until("training")
        until("spare_ready")
        time.sleep(1.0)
        killed_t = time.time()
        agents[1].send_signal(signal.SIGKILL)
        assert until("host_lost", host=1)[0]["t"] - killed_t < AT_ONCE_S
        joined = until("joined", count=2, generation=1)
        assert {event["rank"]: event["node"] for event in joined} == {0: 0, 1: 2}
        worker = until("spare_assigned", rank=1)[0]["pid"]
        killed_t = time.time()
        os.kill(worker, signal.SIGKILL)
        assert until("worker_lost", rank=1)[0]["t_noticed"] - killed_t < AT_ONCE_S
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
