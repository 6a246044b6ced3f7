"""Signs of life, judged with a manual clock."""

import asyncio
import os

import pytest

from regrow.agent import hearing
from regrow.agent.health import Limits, Verdict, Vitals, judge
from regrow.agent.process import Process, cpu_and_state, executed
from regrow.agent.watch import Watch
from regrow.agent.worker import Worker
from regrow.wire import Frame

LIMITS = Limits(dead_after_s=5, stuck_after_s=600)


def verdict(now, *, heartbeat=0.0, cpu=0.0, progress=0.0, waiting=False, stopped=False):
    vitals = Vitals(heartbeat_t=heartbeat, cpu_t=cpu, progress_t=progress, waiting=waiting, stopped=stopped)
    return judge(now, vitals, LIMITS).verdict


@pytest.mark.parametrize(
    ("expected", "now", "signs"),
    [
        (Verdict.WELL, 4.9, {}),
        (Verdict.DEAD, 5.1, {}),
        (Verdict.DEAD, 5.1, {"cpu": 5.0, "stopped": True}),
        (Verdict.WELL, 4.9, {"stopped": True}),
        (Verdict.WELL, 9.0, {"cpu": 8.9}),
        (Verdict.DEAD, 14.0, {"cpu": 8.9}),
        (Verdict.WELL, 599, {"cpu": 599}),
        (Verdict.STUCK, 601, {"cpu": 601}),
        (Verdict.WELL, 599, {"heartbeat": 599}),
        (Verdict.STUCK, 601, {"heartbeat": 601}),
        (Verdict.WELL, 601, {"heartbeat": 601, "waiting": True}),
        (Verdict.WELL, 9000, {"heartbeat": 9000, "progress": 8999}),
    ],
)
def test_judge(expected, now, signs):
    assert verdict(now, **signs) is expected


def test_cpu_and_state_of_a_real_process():
    ticks, state = cpu_and_state(os.getpid())
    assert ticks > 0 and state in "RS"
    assert cpu_and_state(2**22 + 1) is None


def test_replacement_has_a_deadline_measured_by_the_first_setup():
    async def check():
        killed = []
        worker = Worker(rank=0, incarnation=1, replacement=True, attempt_t=1000.0)
        worker.process = Process(executed(["sleep", "60"], {"PATH": "/usr/bin:/bin"}), lambda _: None)
        try:
            complete = [False]
            watch = Watch(LIMITS, lambda: [worker], lambda: complete[0], lambda one, why: killed.append(why))
            watch.set_up_in(3.0)
            watch._look(worker, 2000.0)
            assert killed == [], "while another rank has no host, it waits for that"
            complete[0] = True
            watch._look(worker, 2089.9)
            assert killed == []
            watch._look(worker, 2090.1)
            assert killed == ["its set-up as a replacement took more than 90 s"]
            worker.resumed = True
            watch._look(worker, 9999.0)
            assert len(killed) == 1
        finally:
            worker.process.kill()
            await asyncio.wait_for(worker.process.gone.wait(), 10)
        assert worker.why == "SIGKILL"
        watch._look(worker, 1090.1)
        assert len(killed) == 1

    asyncio.run(check())


def test_what_no_worker_would_send_is_an_error(monkeypatch):
    worker = Worker(rank=0)
    with pytest.raises(ValueError, match="unknown type 'dance'"):
        hearing.hear(worker, Frame({"type": "dance"}), 0.0, 0.0)
    monkeypatch.setattr(hearing, "MAX_RECORD_BYTES", 3)
    with pytest.raises(ValueError, match="set-up record of 4 bytes"):
        hearing.hear(worker, Frame({"type": "setup_done"}, b"1234"), 0.0, 0.0)
    assert not worker.set_up
    assert hearing.hear(worker, Frame({"type": "setup_done"}, b"123"), 0.0, 0.0).record == b"123"
