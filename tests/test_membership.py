"""What becomes of the world: every rule as a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent.happenings import (
    Exited,
    Finished,
    Forgotten,
    Lost,
    LostWorker,
    Resumed,
    SetupDone,
    Stopped,
    Suspect,
)
from regrow.agent.membership import decide
from regrow.agent.world import Phase, Raised, World


def after(world, *events):
    for event in events:
        world = decide(world, event).world
    return world


def new(size=3, max_restarts=100):
    return World.first([size], max_restarts, t=0.0)


def training(size=3, max_restarts=100):
    return after(new(size, max_restarts), *(SetupDone(rank, 0) for rank in range(size)))


def lost(*ranks, incarnation=0, step=5, raised=None, why="SIGKILL"):
    return Lost(tuple(LostWorker(rank, incarnation, why, step, raised) for rank in ranks), t=7.0)


def raised(text="first"):
    return Raised(1, "ValueError", "no", text)


def test_setup_until_all_are_ready():
    world = after(new(), SetupDone(0, 0), SetupDone(2, 0), SetupDone(2, 0))
    assert (world.phase, world.ready, world.holders) == (Phase.SETUP, (0, 2), ())
    world = after(world, SetupDone(1, 0))
    assert (world.phase, world.holders, world.generation) == (Phase.TRAINING, (0, 1, 2), 0)


def test_loss_in_training_replaces_only_that_rank():
    world = after(training(), Finished(0, 0, 0), lost(1))
    assert (world.generation, world.incarnation, world.holders) == (1, (0, 1, 0), (0, 2))
    assert (world.finished, world.restarts, world.phase) == ((), 1, Phase.TRAINING)
    assert [(loss.rank, loss.why, loss.t) for loss in world.lost] == [(1, "SIGKILL", 7.0)]


def test_replacement_becomes_a_holder_when_it_resumes_at_the_generation():
    world = after(training(), lost(1))
    assert decide(world, Resumed(1, 1, 0)).world is world
    assert decide(world, Resumed(1, 0, 1)).world is world
    assert after(world, Resumed(1, 1, 1)).holders == (0, 1, 2)


def test_two_losses_are_two_generations_or_one_together():
    assert after(training(), lost(1), lost(2)).generation == 2
    world = after(training(), lost(1, 2))
    assert (world.generation, world.incarnation, world.restarts) == (1, (0, 1, 1), 2)


def test_a_loss_reported_twice_counts_once():
    world = after(training(), lost(1))
    assert decide(world, lost(1)).world is world


def test_a_replacement_that_dies_too():
    world = after(training(), lost(1), lost(1, incarnation=1))
    assert (world.generation, world.incarnation, world.holders) == (2, (0, 2, 0), (0, 2))


def test_loss_during_setup_starts_all_again():
    world = after(new(), SetupDone(0, 0), lost(1, step=None))
    assert (world.generation, world.incarnation, world.phase, world.ready) == (1, (1, 1, 1), Phase.SETUP, ())


def test_no_holders_left_starts_all_again():
    world = after(training(2), lost(0), lost(1))
    assert (world.phase, world.incarnation, world.holders) == (Phase.SETUP, (2, 1), ())
    assert "no one holds" in world.reason and "from its beginning" in world.reason


def test_what_hosts_keep_outlives_all_workers():
    world = after(new(2), SetupDone(0, 0, kept=True), SetupDone(1, 0, kept=True), lost(0), lost(1))
    assert (world.phase, world.generation, world.incarnation, world.holders) == (Phase.TRAINING, 2, (1, 1), ())
    assert "in the memory of hosts" in world.reason
    world = after(world, lost(0, 1, incarnation=1))
    assert (world.phase, world.generation, world.incarnation) == (Phase.TRAINING, 3, (2, 2))
    assert after(world, Resumed(0, 2, 3), Resumed(1, 2, 3)).holders == (0, 1)


def test_what_some_rank_does_not_keep_is_lost_with_the_workers():
    world = after(new(2), SetupDone(0, 0), SetupDone(1, 0, kept=True), lost(0, 1))
    assert world.phase is Phase.SETUP and "from its beginning" in world.reason
    world = after(new(2), SetupDone(0, 0, kept=True), lost(0), SetupDone(0, 1), SetupDone(1, 1, kept=True))
    assert after(world, lost(0, 1, incarnation=1)).phase is Phase.SETUP


def test_a_memory_that_does_not_make_a_whole_means_a_new_beginning():
    world = after(new(2), SetupDone(0, 0, kept=True), SetupDone(1, 0, kept=True), lost(0, 1))
    begun = after(world, Forgotten(1, 1, 1, "it is gone"))
    assert (begun.phase, begun.generation, begun.incarnation, begun.kept) == (Phase.SETUP, 2, (2, 2), False)
    assert "it is gone" in begun.reason and "from its beginning" in begun.reason
    assert decide(begun, Forgotten(0, 1, 1, "it is gone")).world is begun
    for event in (Forgotten(1, 0, 1, ""), Forgotten(1, 1, 0, "")):
        assert decide(world, event).world is world
    held = after(world, Resumed(0, 1, 1))
    assert decide(held, Forgotten(1, 1, 1, "")).world is held


def test_suspect_reconnects_without_replacing():
    world = after(training(), Suspect(1, 0, 0, "reset"))
    assert (world.generation, world.incarnation, world.holders, world.lost) == (1, (0, 0, 0), (0, 1, 2), ())
    assert decide(world, Suspect(2, 0, 0, "reset")).world is world


@pytest.mark.parametrize(
    "world", [new(), after(training(2), Finished(0, 0, 0), Finished(1, 0, 0))], ids=["setup", "all finished"]
)
def test_suspect_is_ignored_where_it_cannot_help(world):
    assert decide(world, Suspect(1, 0, 0, "reset")).world is world


def test_the_same_exception_three_times_fails_with_the_first_traceback():
    world = after(training(), lost(1, raised=raised("first"), why="exit code 1"), Resumed(1, 1, 1))
    world = after(world, lost(1, incarnation=1, raised=raised("second"), why="exit code 1"), Resumed(1, 2, 2))
    assert (world.phase, world.raised["1@5"].count) == (Phase.TRAINING, 2)
    world = after(world, lost(1, incarnation=2, raised=raised("third"), why="exit code 1"))
    assert (world.phase, world.exit_code, world.evidence) == (Phase.FAILED, 1, "first")
    assert "rank 1 failed at step 5 3 times with ValueError: no" in world.reason


def test_fatal_exception_fails_at_once():
    world = after(training(), lost(1, raised=Raised(1, "Unrecoverable", "all gone", "trace", fatal=True)))
    assert (world.phase, world.evidence) == (Phase.FAILED, "trace")
    assert "rank 1: Unrecoverable: all gone" in world.reason


def test_exceptions_at_different_steps_do_not_add_up():
    world = training()
    for n in range(5):
        world = after(world, lost(1, incarnation=n, step=n, raised=raised()), Resumed(1, n + 1, n + 1))
    assert world.phase is Phase.TRAINING


def test_exceptions_of_all_ranks_at_once_count_over_full_restarts():
    world = training(2)
    for n in range(3):
        world = after(world, lost(0, 1, incarnation=n, raised=raised(f"{n}")), SetupDone(0, n + 1), SetupDone(1, n + 1))
    assert (world.phase, world.evidence) == (Phase.FAILED, "0")


def test_setup_failures_count_only_in_a_row():
    def failing(n):
        return lost(0, incarnation=n, step=None, raised=raised())

    world = after(new(2), failing(0), failing(1))
    assert after(world, failing(2)).phase is Phase.FAILED
    world = after(world, SetupDone(0, 2), failing(2), failing(3))
    assert world.phase is Phase.SETUP


def test_too_many_restarts():
    world = after(training(max_restarts=1), lost(1))
    assert world.phase is Phase.TRAINING
    world = after(world, lost(2))
    assert (world.phase, world.exit_code) == (Phase.FAILED, 1)
    assert "--max-restarts 1" in world.reason


def test_done_when_all_have_exited():
    world = after(training(2), Finished(0, 0, 0), Finished(1, 0, 0))
    assert world.all_finished
    world = after(world, Exited(0, 0, 9), Exited(1, 0, 9))
    assert (world.phase, world.exit_code) == (Phase.DONE, 0)


def test_finished_at_an_old_generation_is_ignored():
    world = after(training(2), lost(1))
    assert decide(world, Finished(0, 0, 0)).world is world


def test_a_script_without_regrow_succeeds():
    assert after(new(2), Exited(0, 0), Exited(1, 0)).phase is Phase.DONE


def test_leaving_the_loop_early_together_is_success():
    assert after(training(2), Exited(0, 0, 4), Exited(1, 0, 4)).phase is Phase.DONE


def test_leaving_early_counts_as_finished_for_the_others():
    assert after(training(2), Exited(1, 0, 4), Finished(0, 0, 0)).all_finished


@pytest.mark.parametrize("event", [Suspect(0, 0, 0, "reset"), lost(0)], ids=["suspect", "lost"])
def test_leaving_early_while_others_go_on_fails(event):
    world = after(training(3), Exited(1, 0, 4), event)
    assert world.reason == "rank 1 left the training loop at step 4 while others go on"
    assert (world.phase, world.exit_code) == (Phase.FAILED, 1)


@pytest.mark.parametrize("events", [(SetupDone(0, 0), Exited(1, 0)), (Exited(1, 0), SetupDone(0, 0))])
def test_leaving_during_setup_while_others_go_on_fails(events):
    assert "rank 1 ended during set-up" in after(new(2), *events).reason


def test_a_replacement_that_leaves_before_it_took_over_fails():
    world = after(training(), lost(1), Exited(1, 1))
    assert world.phase is Phase.FAILED and "rank 1's replacement" in world.reason


def test_death_after_the_last_step_fails():
    world = after(training(2), Finished(0, 0, 0), Finished(1, 0, 0), lost(1, why="exit code 1"))
    assert world.phase is Phase.FAILED
    assert world.reason.startswith("rank 1 died (exit code 1) after the last step")


def test_death_of_one_that_finished_while_others_have_not():
    world = after(training(2), Finished(1, 0, 0), lost(1))
    assert (world.phase, world.generation, world.finished) == (Phase.TRAINING, 1, ())


def test_stopped():
    world = after(training(), Stopped(1, "stopped by SIGTERM on node 1", 143))
    assert (world.phase, world.exit_code) == (Phase.FAILED, 143)


def test_nothing_happens_after_the_end():
    world = after(training(1), Exited(0, 0))
    assert decide(world, lost(0)).world is world


ranks = st.integers(0, 2)
small = st.integers(0, 3)
anything = st.one_of(
    st.builds(SetupDone, ranks, small, kept=st.booleans()),
    st.builds(Forgotten, ranks, small, small, st.just("gone")),
    st.builds(Resumed, ranks, small, small),
    st.builds(Finished, ranks, small, small),
    st.builds(Suspect, ranks, small, small, st.just("why")),
    st.builds(Exited, ranks, small, small),
    st.builds(lost, ranks, incarnation=small),
    st.builds(lost, ranks, ranks, incarnation=small, raised=st.just(raised())),
)


@given(st.lists(anything, max_size=40))
def test_whatever_comes_the_world_stays_sound(events):
    world = new(3, max_restarts=8)
    for event in events:
        before, decision = world, decide(world, event)
        world = decision.world
        assert decision.reason
        assert World.loads(world.dumps()) == world
        assert world.generation >= before.generation
        assert all(new >= old for new, old in zip(world.incarnation, before.incarnation, strict=True))
        if world.incarnation != before.incarnation:
            assert world.generation > before.generation
        if world.phase is Phase.TRAINING:
            assert world.holders or world.kept
        assert (world.exit_code is not None) == world.over


def test_a_rank_may_be_through_before_others_are_set_up():
    """A run that finds all its steps done does nothing between the two."""
    world = after(new(2), SetupDone(0, 0), Finished(0, 0, 0))
    assert not world.all_finished
    assert after(world, SetupDone(1, 0), Finished(1, 0, 0)).all_finished
    early = new(2)
    assert decide(early, Finished(0, 0, 0)).world is early
