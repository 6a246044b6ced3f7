"""Which source is taken: the one with the least expected time, for every combination of those that are left."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from regrow.errors import Unrecoverable
from regrow.explain import explain
from regrow.ids import Rank, Step
from regrow.plan import Copy, Holding, Load, Plan, Replay, Restore, decision, make_plan
from regrow.plan.costs import Costs
from regrow.plan.ladder import Candidate, candidates, choose
from regrow.rules import Rules, Source
from regrow.testing import Fault

SCRIPTS = Path(__file__).parent / "scripts"
SHARDED, PIPELINE = SCRIPTS / "sharded.py", SCRIPTS / "pipeline.py"
FRONT = 20
MB = 10**6


def measured(rng: random.Random) -> Costs:
    """Speeds and times over some orders of magnitude, so that any source may be the best."""
    speeds = [Source.REPLICA, Source.MEMORY, Source.PEER, Source.ROLLBACK, Source.DISK]
    return Costs(
        fetched=tuple((source, 10 ** rng.uniform(6, 9)) for source in speeds),
        step_s=10 ** rng.uniform(-2, 1),
        replay_s=10 ** rng.uniform(-2, 1),
    )


def rate(costs: Costs, source: Source) -> float:
    return dict(costs.fetched)[source]


def held(rank: int, step: int | None, costs: Costs, **more) -> Holding:
    at = None if step is None else Step(step)
    fields = {"params": 4, "layout": "same", "state_bytes": 8 * MB, "costs": costs}
    return Holding(rank=Rank(rank), step=at, **{**fields, **more})


def subsets(sources):
    return itertools.chain.from_iterable(itertools.combinations(sources, size) for size in range(len(sources) + 1))


def taken(plan: Plan) -> str:
    (line,) = [line for line in plan.weighed if line.endswith("<- taken")]
    return line.split()[1]


def examine(holdings: list[Holding], expected: dict[Source, float]) -> str:
    """The cheapest of what is there is taken, each one can be forced, and what is not there says so."""
    found = {each.sources: each for each in candidates(holdings)}
    there = {sources[0]: each.seconds for sources, each in found.items() if each.plan is not None}
    assert there == pytest.approx(expected)
    for source in Source:
        rules = Rules(force=source)
        if source in expected:
            assert taken(make_plan(holdings, rules)) == source
            continue
        with pytest.raises(Unrecoverable, match=f"--force-source {source}|lost|every rank|cannot go on"):
            make_plan(holdings, rules)
    if not expected:
        with pytest.raises(Unrecoverable):
            make_plan(holdings)
        return ""
    best = taken(make_plan(holdings))
    assert expected[Source(best)] == min(expected.values())
    return best


@pytest.mark.parametrize("seed", range(20))
def test_replicas(seed):
    """Data parallelism: replicas and storage, each there or not."""
    rng = random.Random(seed)
    costs, disk = measured(rng), rng.randrange(FRONT + 1)
    best = set()
    for there in subsets([Source.REPLICA, Source.DISK]):
        steps = (Step(disk),) if Source.DISK in there else ()
        at = FRONT if Source.REPLICA in there else None
        holdings = [held(rank, at, costs, disk=steps) for rank in (0, 1)]
        holdings.append(held(2, None, costs, disk=steps, own_steps=(Step(FRONT),), state_bytes=4 * MB))
        front = FRONT if Source.REPLICA in there else disk
        price = {
            Source.REPLICA: 8 * MB / (2 * rate(costs, Source.REPLICA)),
            Source.DISK: 8 * MB / rate(costs, Source.DISK) + (front - disk) * costs.step_s,
        }
        best.add(examine(holdings, {source: price[source] for source in there}))
    assert best >= {"", "replica", "disk"}


@pytest.mark.parametrize("seed", range(20))
def test_shards(seed):
    """Two parts, each held twice: own memory, another host's, a replica and storage, each there or not."""
    rng = random.Random(seed)
    costs = measured(rng)
    at = {source: rng.randrange(FRONT - 4, FRONT + 1) for source in (Source.MEMORY, Source.PEER, Source.DISK)}
    past = tuple((Step(step), 0) for step in range(FRONT - 4, FRONT))
    for there in subsets([Source.MEMORY, Source.PEER, Source.REPLICA, Source.DISK]):
        disk = (Step(at[Source.DISK]),) if Source.DISK in there else ()
        kept = ((Rank(2), Step(at[Source.PEER]), 0),) if Source.PEER in there else ()
        own = ((Step(at[Source.MEMORY]), 0),) if Source.MEMORY in there else ()
        more = {"snapshot_bytes": 6 * MB, "disk": disk}
        survivor = {**more, "snapshots": past, "node": 0}
        lost = {**more, "snapshots": own, "own_steps": (Step(FRONT),) if Source.REPLICA in there else (), "node": 1}
        holdings = [
            held(0, FRONT, costs, place="a", kept=kept, **survivor),
            held(1, FRONT, costs, place="b", **survivor),
            held(2, None, costs, place="a", **lost),
            held(3, FRONT, costs, place="b", **survivor),
        ]

        def price(source: Source) -> float:
            if source is Source.REPLICA:
                return 8 * MB / rate(costs, source)
            own_s = (8 if source is Source.DISK else 6) * MB / rate(costs, source)
            others_s = 0.0 if at[source] == FRONT else 6 * MB / rate(costs, Source.MEMORY)
            again_s = (FRONT - at[source]) * costs.step_s
            return (own_s if source is Source.DISK else max(own_s, others_s)) + again_s

        examine(holdings, {source: price(source) for source in there})


@pytest.mark.parametrize("seed", range(20))
def test_stages(seed):
    """A pipeline: a replica, journals, the stages' checkpoints and storage, each there or not."""
    rng = random.Random(seed)
    costs = measured(rng)
    disk, saved = rng.randrange(FRONT + 1), rng.randrange(1, FRONT)
    for there in subsets([Source.REPLICA, Source.REPLAY, Source.ROLLBACK, Source.DISK]):
        replica, replay, rollback = (each in there for each in (Source.REPLICA, Source.REPLAY, Source.ROLLBACK))
        stored = (Step(disk),) if Source.DISK in there else ()
        mine = (Step(saved),) if replay or rollback else ()
        theirs = mine if rollback else ()
        row = {"disk": stored, "journal_from": Step(0 if replay else FRONT), "recent_from": Step(FRONT)}

        def stage(rank, number, step, domain="x", checkpoints=theirs, row=row, **more):
            known = {"stage": number, "layout": f"{number}", "domain": f"{rank}", "checkpoints": checkpoints}
            return held(rank, step, costs, **{**row, **known, **more})

        holdings = [stage(0, 0, FRONT, state_bytes=9 * MB), stage(1, 1, None, checkpoints=mine, state_bytes=0)]
        if replica:  # without a replica the stage has one rank
            holdings += [stage(2, 0, FRONT), stage(3, 1, FRONT, checkpoints=mine)]
            holdings[1] = stage(1, 1, None, checkpoints=mine, state_bytes=0, own_steps=(Step(FRONT),))
        load_s, lost = 9 * MB / rate(costs, Source.ROLLBACK), FRONT - saved
        price = {
            Source.REPLICA: 8 * MB / rate(costs, Source.REPLICA),
            Source.REPLAY: load_s + lost * min(costs.replay_s, costs.step_s),
            Source.ROLLBACK: load_s + lost * costs.step_s,
            Source.DISK: 9 * MB / rate(costs, Source.DISK) + (FRONT - disk) * costs.step_s,
        }
        examine(holdings, {source: price[source] for source in there})


def test_lost_ranks_may_use_different_sources():
    """Rank 2 has a replica and no memory, rank 1 memory and no replica's random numbers."""
    costs = Costs(step_s=1.0)
    past = ((Step(4), 0),)
    rows = {"snapshots": past, "snapshot_bytes": MB, "own_steps": (Step(5),)}
    holdings = [
        held(0, 5, costs, place="a", **rows),
        held(1, None, costs, place="b", snapshots=((Step(5), 0),), snapshot_bytes=MB),
        held(2, None, costs, place="a", own_steps=(Step(5),)),
        held(3, 5, costs, place="b", **rows),
    ]
    plan = make_plan(holdings)
    assert taken(plan) == "memory+replica" and plan.step == 5
    assert [action.rank for action in plan.actions if isinstance(action, Restore)] == [1]
    assert [action.rank for action in plan.actions if isinstance(action, Copy)] == [2]
    with pytest.raises(Unrecoverable, match=r"--force-source memory .* no snapshot of rank 2"):
        make_plan(holdings, Rules(force=Source.MEMORY))


def test_another_hosts_memory_is_not_taken_for_nearer_than_the_own_one():
    """Not even if the own one was measured while everything was slow, and the other one never."""
    costs = Costs(step_s=1.0, hinted=((Source.MEMORY, 1e6),))
    kept, here = ((Rank(1), Step(5), 0),), ((Step(5), 0),)
    rows = [
        held(0, 5, costs, place="a", snapshots=here, snapshot_bytes=MB, kept=kept, node=0),
        held(1, None, costs, place="b", snapshots=here, snapshot_bytes=MB, node=1),
    ]
    plan = make_plan(rows)
    assert taken(plan) == "memory"
    assert plan.weighed[1] == (
        "candidate peer     1.001 s: 1.00 MB at 1.00 GB/s (assumed) and on through the own memory"
    )


def test_an_older_step_may_be_nearer():
    """The newest snapshot of rank 1 lies on another host, over a slow network; the one before it in its own memory."""
    kept = ((Rank(1), Step(5), 0),)
    for step_s, expected in ((0.1, 4), (30.0, 5)):
        costs = Costs(step_s=step_s, fetched=((Source.MEMORY, 1e9), (Source.PEER, 1e6)))
        both = ((Step(4), 0), (Step(5), 0))
        plan = make_plan(
            [
                held(0, 5, costs, place="a", snapshots=both, snapshot_bytes=10 * MB, kept=kept, node=0),
                held(1, None, costs, place="b", snapshots=both[:1], snapshot_bytes=10 * MB, node=1),
            ]
        )
        assert plan.step == expected, plan.lines()


def test_what_was_not_measured_is_assumed_and_said():
    lines = make_plan([held(0, 5, Costs()), held(1, None, Costs(), own_steps=(Step(5),))]).lines()
    assert lines[1:4] == [
        "candidate replica  0.008 s: 8.00 MB at 1.00 GB/s (assumed)  <- taken",
        "candidate memory   not there: no snapshots of replicated state are taken",
        "candidate disk     not there: storage has no checkpoint of the job that every rank sees",
    ]


def test_what_is_measured_is_said():
    costs = Costs(step_s=0.62, fetched=((Source.REPLICA, 1.2e9),), hinted=((Source.DISK, 8e8),))
    disk = (Step(4),)
    lost = held(2, None, costs, own_steps=(Step(10),), disk=disk)
    plan = make_plan([held(0, 10, costs, disk=disk), held(1, 10, costs, disk=disk), lost])
    assert plan.weighed[0] == "candidate replica  0.003 s: 8.00 MB from 2 ranks at 1.20 GB/s each  <- taken"
    # a fixed part, as long as reading was not measured with it
    assert plan.weighed[2] == (
        "candidate disk     3.780 s: 8.00 MB at 800.00 MB/s (as it was written), 6 steps of 0.620 s again"
    )


def test_replays_take_as_long_as_steps_until_one_was_measured():
    fast = Costs(step_s=1.0, fetched=((Source.DISK, 1e12), (Source.ROLLBACK, 1e12)))

    def pipeline(costs: Costs) -> Plan:
        rows = [
            {"stage": rank, "layout": f"{rank}", "domain": f"{rank}", "checkpoints": (Step(0),), "disk": (Step(4),)}
            for rank in range(2)
        ]
        ahead = held(0, 9, costs, journal_from=Step(0), recent_from=Step(0), **rows[0])
        return make_plan([ahead, held(1, None, costs, **rows[1])])

    assert taken(pipeline(fast)) == "disk"
    plan = pipeline(Costs(step_s=1.0, replay_s=0.2, fetched=fast.fetched))
    assert taken(plan) == "replay" and [action.rank for action in plan.actions if isinstance(action, Replay)] == [1]
    slow = pipeline(Costs(step_s=1.0, replay_s=9.0, fetched=fast.fetched))  # a new process's, on a busy machine
    assert any("candidate replay   9.000 s: " in line for line in slow.lines()), slow.lines()


def test_a_rank_that_was_set_back_does_not_roll_forward():
    """A recovery from storage was interrupted: rank 0 has loaded step 5, rank 1 stands one further, as before."""
    disk = (Step(5),)
    rows = [
        held(0, 5, Costs(), disk=disk, set_back=True),
        held(1, 6, Costs(), disk=disk),
        held(2, None, Costs(), disk=disk, own_steps=(Step(6),)),
    ]
    plan = make_plan(rows)
    assert [action.rank for action in plan.actions if isinstance(action, Load)] == [0, 1, 2]
    assert "random numbers" in plan.reason


@pytest.mark.parametrize("more", [{}, {"stage": 0}, {"place": "a"}])
def test_replicas_that_are_none_are_not_used_but_storage_is(more):
    rows = [held(rank, 5, Costs(), checksum=rank, disk=(Step(3),), **more) for rank in range(2)]
    plan = make_plan([*rows, held(2, None, Costs(), disk=(Step(3),), **more)])
    assert taken(plan) == "disk" and "ranks 0 and 1 hold different parameters at step 5" in plan.reason


def test_nothing_is_forced_where_nothing_was_lost():
    plan = make_plan([held(0, 5, Costs()), held(1, 5, Costs())], Rules(force=Source.DISK))
    assert plan.step == 5 and "candidate nothing lost 0.000 s: nothing is moved  <- taken" in plan.lines()


def test_what_is_not_exact_has_to_be_allowed():
    plan = make_plan([held(0, 5, Costs()), held(1, None, Costs(), own_steps=(Step(5),))])
    sure = Candidate(sources=(Source.REPLICA,), plan=plan, seconds=2.0, text="")
    rough = Candidate(sources=(Source.PARTIAL,), plan=plan, seconds=1.0, text="", exact=False)
    assert choose([sure, rough]) is sure
    assert choose([sure, rough], Rules(approximate=True)) is rough
    with pytest.raises(Unrecoverable):
        choose([rough])


def test_a_decision_is_made_again_from_what_was_recorded():
    rng = random.Random(1)
    costs = measured(rng)
    disk = (Step(18),)
    holdings = [held(0, 20, costs, disk=disk), held(1, 20, costs, disk=disk, why_not="x")]
    holdings.append(held(2, None, costs, disk=disk, own_steps=(Step(20),)))
    plan = make_plan(holdings)
    event = json.loads(json.dumps({"generation": 1, **decision.to_json(holdings, Rules(), plan)}))
    assert decision.from_json(event).holdings == tuple(holdings)
    assert set(event["holdings"][1]) == {"rank", "why_not"}  # the rest is as of rank 0
    text = explain(event)
    assert text.startswith("generation 1: decided as then\n") and all(f"  {line}" in text for line in plan.lines())
    for source in (Source.REPLICA, Source.DISK):
        forced = explain(event, source)
        assert f"with --force-source {source}" in forced and f"candidate {source:8}" in forced
    assert "there is no way to go on: --force-source peer" in explain(event, Source.PEER)
    event["lines"][0] = "go on at step 3: for no reason"
    assert explain(event).startswith("generation 1: decided otherwise than then; then: go on at step 3")
    assert "cannot be told" in explain({"generation": 1})
    lost = [held(0, None, costs), held(1, None, costs)]
    with pytest.raises(Unrecoverable) as refused:
        make_plan(lost)
    none = {"generation": 2, **decision.to_json(lost, Rules(), None, str(refused.value))}
    assert explain(json.loads(json.dumps(none))).startswith("generation 2: decided as then\n")


def test_a_forced_source_and_its_explanation(tmp_path):
    """A replica lives, but storage is wanted: all go back, and the result is the same."""
    faults = [Fault(point="in_backward", rank=1, step=9)]
    flags = ("--ckpt-dir", str(tmp_path / "ckpt"), "--ckpt-every", "4", "--force-source", "disk")
    job = harness.check("--steps", "16", nproc=3, faults=faults, spares=1, flags=flags)
    (plan,) = job.plans()
    assert "load     ranks 0, 1, 2: the job's checkpoint of step" in plan
    assert "candidate replica" in plan and plan.count("<- taken") == 1
    words = [sys.executable, "-m", "regrow", "explain", str(job.log_dir)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("generation 1: decided as then (--force-source disk)"), told.stdout
    assert all(f"  {line}" in told.stdout.splitlines() for line in plan.splitlines()), told.stdout
    other = subprocess.run([*words, "--force", "replica"], capture_output=True, text=True, timeout=60).stdout
    assert "copy     rank 1: everything at step" in other and "with --force-source replica" in other
    nothing = subprocess.run([*words, "--generation", "7"], capture_output=True, text=True, timeout=60)
    assert nothing.returncode == 1 and "no plan for generation 7" in nothing.stderr


@harness.thorough
@pytest.mark.parametrize(
    ("source", "script", "args", "flags", "said"),
    [
        ("rollback", PIPELINE, (), ("--failure-domain", "rank"), "load     ranks 0, 1, 2, 3: the checkpoint of step 5"),
        (
            "replica",
            SHARDED,
            ("--how", "hsdp", "--steps", "12"),
            (),
            "copy     rank 1: everything at step 8 from rank 3",
        ),
    ],
)
def test_a_dearer_source_gives_the_same_bits(source, script, args, flags, said):
    """Journals would spare the others their way back, and the host's memory has a snapshot."""
    faults = [
        Fault(point="in_backward", rank=1, step=8, nth=9 if script == SHARDED else 1)
    ]  # all have begun it by then
    flags = (*flags, "--force-source", source)
    job = harness.check(*args, nproc=4, faults=faults, spares=1, flags=flags, script=script)
    assert said in job.plans()[0] and f"candidate {source:8} " in job.plans()[0], job.plans()


def test_a_forced_source_that_is_not_there():
    faults = [Fault(point="in_backward", rank=1, step=3)]
    job = harness.run_job("--steps", "6", nproc=2, faults=faults, spares=1, flags=("--force-source", "disk"))
    assert job.code == 1
    assert "--force-source disk does not allow what is left" in job.output, job.output
    assert "storage has no checkpoint" in job.output and job.events("no_plan"), job.output
